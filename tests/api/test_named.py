"""The tree that the parallel module shows: what can be walked, what cannot be set, and what is said of losses."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from autopar import AutoparError, AutoparWarning
from autopar.ir.mesh import Mesh
from autopar.runtime.simulate import run_ranks
from tests.api.models import WIDTH, features, seeded


class Named(nn.Module):
    """Has settings of its own, of its class and of its parts, a list, and a module with two names."""

    power = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.drop = 0.5, nn.Dropout(0.0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH)])
        self.again = self.drop

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = self.again(self.drop(layer(x)))
        return (x**self.power).mean() * self.tau, x.abs().mean()


def made() -> Any:
    model = seeded(Named)
    return autopar.parallelize(model, "dp=1", (features(4, WIDTH),), heartbeat=None, loss=lambda out: out[0])


def test_settings_of_the_model_cannot_be_changed() -> None:
    pm = made()
    for place, name, value in [
        (pm, "tau", 1.0), (pm, "power", 3.0), (pm.drop, "p", 0.9), (pm, "drop", nn.Dropout(0.9)), (pm.layers, "0", None)
    ]:  # fmt: skip
        with pytest.raises(AutoparError, match=name) as raised:
            setattr(place, name, value)
        assert raised.value.slug == "fixed-module"
    for hook in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        with pytest.raises(AutoparError, match=hook):
            getattr(pm.layers[0], hook)(lambda *args: None)
    pm.mine, pm.drop.mine, pm.training = 3, 4, True
    pm.layers[0].weight.requires_grad_(True)
    pm.train_step(features(4, WIDTH))


def test_lists_can_be_walked() -> None:
    pm = made()
    assert len(pm.layers) == 3 and [*pm.layers] == [*pm.layers.children()]
    assert pm.layers[-1] is pm.layers[2] is pm.get_submodule("layers.2") and bool(pm.layers[1])
    assert [*pm.layers[:2]] == [pm.layers[0], pm.layers[1]] and pm["drop"] is pm.drop
    assert pm.again is pm.drop
    with pytest.raises(TypeError, match="list"):
        pm[0]
    with pytest.raises(IndexError):
        pm.layers[3]


def test_two_scalars_are_no_loss() -> None:
    x = features(4, WIDTH)
    pm = autopar.parallelize(seeded(Named), "dp=1", (x,), heartbeat=None)
    with pytest.raises(AutoparError, match="2 of them scalar") as raised:
        pm.train_step(x)
    assert raised.value.slug == "no-loss" and "loss=" in str(raised.value.fix)


def test_a_loss_outside_is_warned_of() -> None:
    """Once, and where its gradients are summed over several data ranks."""

    def rank(at: int) -> Tensor:
        pm = autopar.parallelize(seeded(lambda: nn.Linear(WIDTH, 2)), "dp=2", (features(4, WIDTH),), heartbeat=None)
        for _ in range(2):
            pm(features(4, WIDTH)).mean().backward()
        weight = pm.full_gradients()["weight"]
        assert weight is not None
        return weight

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = run_ranks(Mesh.parse("dp=2"), rank)
    model = seeded(lambda: nn.Linear(WIDTH, 2))
    model(features(4, WIDTH)).mean().backward()
    assert_close(found, [model.weight.grad * 4] * 2)  # two backwards of two ranks
    said = [w for w in heard if issubclass(w.category, AutoparWarning) and "loss=" in str(w.message)]
    assert len(said) == 2 and "2 times" in str(said[0].message)
    assert torch.is_grad_enabled()
