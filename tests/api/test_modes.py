"""Modes by module, and which outputs are rows of the batch."""

import copy
import warnings

import pytest
import torch
from torch import nn

import autopar
from autopar.compile import MANY, lower
from autopar.ir.mesh import Mesh
from tests.ranks import Ranks


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x))).pow(2).mean()


class Coincidence(nn.Module):
    """Eight features, eight rows: an output of features, and one whose rows are out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.linear(x)
        return hidden, hidden.mean((0, 1)), hidden.flip(0)


def test_a_submodule_set_apart_afterwards_is_heard():
    model = Normed()
    same, x = copy.deepcopy(model), torch.randn(6, 4)
    pm = autopar.parallelize(model, "dp=1", (x,))
    for module in (pm, same):
        module.norm.eval()
        module.drop.eval()
    torch.testing.assert_close(pm.train_step(x), same(x).detach())
    assert not pm.norm.running_mean.any()
    pm.norm.train()
    same.norm.train()
    torch.testing.assert_close(pm.train_step(x), same(x).detach())
    assert pm.norm.running_mean.any()


def test_a_submodule_set_apart_before_stays_so():
    model = Normed()
    model.norm.eval()
    model.drop.eval()
    same, x = copy.deepcopy(model), torch.randn(6, 4)
    pm = autopar.parallelize(model, "dp=1", (x,))
    assert pm.training and not pm.norm.training
    torch.testing.assert_close(pm.train_step(x), same(x).detach())


def test_a_deferred_module_has_the_mode_of_the_model():
    model, x = Normed().eval(), torch.randn(6, 4)
    pm = autopar.parallelize(model, "dp=1")
    assert not pm.training
    torch.testing.assert_close(pm(x), model(x))


def test_rows_are_known_by_factor_not_by_size():
    program = lower(Coincidence(), (torch.randn(4, 5, 3),), {}, Mesh.parse("dp=2"), after="trace")
    assert [o.batch_dim for o in program.outputs] == [0, None, 0]
    assert autopar.verify(Coincidence(), "dp=2", (torch.randn(8, 5, 3),)).ok


def test_a_retrace_keeps_the_sub_axes_of_the_first():
    from autopar.passes.base import Context
    from autopar.passes.pipeline import run
    from autopar.trace import trace

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    mesh = Mesh.parse("tp=4")
    program = trace(model, (torch.randn(2, 8),), {}, mesh=mesh).program
    split = run(program, "data-parallel,tensor-parallel", Context(mesh=mesh.split("tp", 2)))
    assert split.mesh.names == ("tp0", "tp1")
    pinned = {n: p.layout for n, p in split.params.items() if p.layout}
    again = run(program, "data-parallel,tensor-parallel", Context(pinned=pinned, mesh=split.mesh))
    assert {n: p.layout for n, p in again.params.items()} == pinned


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return self.linear(x) * by


def test_many_ways_of_calling_are_told_of():
    model, x = Scaled(), torch.randn(2, 3)
    pm = autopar.parallelize(model, "dp=1", (x, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(1, MANY - 1):
            pm(x, i / 4)
    with pytest.warns(autopar.AutoparWarning, match=f"traced for {MANY} ways of calling it"):
        torch.testing.assert_close(pm(x, -1.0), model(x, -1.0))


class Heads(nn.Module):
    """Its second projection is read when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, more: bool = False) -> torch.Tensor:
        y = self.first(x)
        return self.second(y) if more else y


def late(model: nn.Module, x: torch.Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pm = autopar.parallelize(model, "tp=2", (x,))
        torch.testing.assert_close(pm(x, more=True), model(x, more=True))
    return [str(w.message) for w in said if isinstance(w.message, autopar.AutoparWarning)]


def test_parameters_that_the_first_call_did_not_read_are_said_to_be_whole(ranks: Ranks) -> None:
    torch.manual_seed(0)
    for said in ranks.run(2, late, Heads(), torch.randn(2, 8)):
        names = "second.weight [8, 8], second.bias [8]"
        assert said == [f"tp=2: the first call did not use {names}; every rank holds them whole"]
