"""Ways of calling: structures, modes, shapes, first calls, models side by side."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from tests.api.models import WIDTH, Lm, Mlp, Output, batch, features, seeded, squares
from tests.ranks import Ranks


def rows(data: Any, ways: int, at: int) -> Any:
    """A data rank's part of a batch."""
    return {n: t.tensor_split(ways)[at] for n, t in data.items()}


def stepped(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of the unsharded model."""
    model.zero_grad()
    loss = model(**kwargs).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


def same(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@dataclass
class Batch:
    """A user's own input."""

    x: Tensor
    scale: float


class Structured(nn.Module):
    """Takes a dataclass, a nested dict and a keyword; gives a dict with a list, None and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, own: Batch, more: dict[str, Any], *, bias: Tensor | None = None) -> dict[str, Any]:
        y = self.mlp(own.x * own.scale) + more["deep"]["y"]
        return {
            "y": y if bias is None else y + bias,
            "list": [y.mean(), None],
            "three": 3,
            "row": more["deep"]["y"][0, 0],
        }


def structured() -> None:
    model = seeded(Structured)
    pm = autopar.parallelize(model, "tp=2", *structured_inputs(2.0, True))
    for args, kwargs in (structured_inputs(2.0, True), structured_inputs(2.0, False), structured_inputs(3.0, True)):
        got, want = pm(*args, **kwargs), model(*args, **kwargs)
        assert list(got) == list(want) and got["three"] == 3 and got["list"][1] is None
        assert isinstance(got["list"], list)
        assert_close((got["y"], got["list"][0]), (want["y"], want["list"][0]))


def structured_inputs(scale: float, bias: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = {"bias": features(WIDTH)} if bias else {}
    return (Batch(features(4, 6, WIDTH), scale), {"deep": {"y": features(4, 6, WIDTH, seed=2)}}), kwargs


def outputs() -> None:
    """A batched output holds this rank's rows, any other the value of the whole batch."""
    model, at = seeded(Lm), dist.get_rank() // 2
    pm = autopar.parallelize(model, "dp=2,tp=2", kwargs=rows(batch(5), 2, at))
    got, want = pm(**rows(batch(5), 2, at)), model(**batch(5))
    assert type(got) is Output and list(got.extra) == ["mean", "none"] and got.extra["none"] is None
    assert_close(got.logits, want.logits.tensor_split(2)[at])
    assert_close(got.extra["mean"], want.extra["mean"])
    assert_close(got.loss, want.loss)
    bare = pm(rows(batch(5), 2, at)["ids"])
    assert bare.loss is None
    assert_close(bare.logits, got.logits)


def modes() -> None:
    """Train and eval are different graphs of the same parameters; going back works."""
    model = seeded(Lm, dropout=0.5).eval()
    pm = autopar.parallelize(model, "tp=2", kwargs=batch())
    want, grads = stepped(copy.deepcopy(model), batch())
    assert not pm.training
    assert float(pm.train_step(**batch())) == pytest.approx(want, rel=1e-5)
    same(pm.full_gradients(), grads)
    assert pm.train() is pm and pm.training
    noisy = {float(pm.train_step(**batch())) for _ in range(2)}
    assert len(noisy) == 2 and want not in noisy
    pm.eval()
    assert float(pm(**batch()).loss.detach()) == pytest.approx(want, rel=1e-5)
    assert int(pm.get_buffer("calls")) == 4


def shapes() -> None:
    """Other lengths and numbers of rows are traced anew; parameters and gradients are shared."""
    model, at = seeded(Lm), dist.get_rank() // 2
    pm = autopar.parallelize(model, "dp=2,tp=2", kwargs=rows(batch(), 2, at))
    parameters = [id(p) for p in pm.parameters()]
    for given in ((4, 6), (4, 9), (3, 6), (2, 1), (7, 6), (4, 6)):
        want, grads = stepped(model, batch(*given))
        pm.zero_grad()
        assert float(pm.train_step(**rows(batch(*given), 2, at))) == pytest.approx(want, rel=1e-5)
        same(pm.full_gradients(), grads)
    assert [id(p) for p in pm.parameters()] == parameters


def at_first_call() -> None:
    """Without example inputs the module is compiled at its first call, whatever that is."""
    for first in ("train_step", "forward"):
        model = seeded(Lm)
        pm = autopar.parallelize(model, "tp=2").eval()
        want, grads = stepped(model, batch())
        if first == "forward":
            assert float(pm(**batch()).loss.detach()) == pytest.approx(want, rel=1e-5)
        assert float(pm.train_step(**batch())) == pytest.approx(want, rel=1e-5)
        same(pm.full_gradients(), grads)
        assert not pm.training and len(pm.state_dict()) == len(model.state_dict())


def side_by_side() -> None:
    """Two models, two meshes of one process; each keeps to its own."""
    one, two = seeded(Lm), seeded(Lm, vocabulary=24, layers=1)
    many = autopar.parallelize(one, "dp=1,tp=4", kwargs=batch())
    few = autopar.parallelize(two, "dp=2,tp=2", kwargs=rows(batch(), 2, dist.get_rank() // 2))
    for _ in range(2):
        for model, pm, ways in ((one, many, 1), (two, few, 2)):
            want, grads = stepped(model, batch())
            pm.zero_grad()
            mine = rows(batch(), ways, dist.get_rank() * ways // 4)
            assert float(pm.train_step(**mine)) == pytest.approx(want, rel=1e-5)
            same(pm.full_gradients(), grads)


def untouched() -> None:
    """The user's model keeps weights, flags, hooks, configuration and forward."""
    model = seeded(Lm).train()
    model.layers[1].eval()
    model.layers[0].up.weight.requires_grad_(False)
    before = {n: (t.clone(), t.data_ptr(), t.requires_grad) for n, t in model.state_dict(keep_vars=True).items()}
    attributes = {n: (m.training, set(m.__dict__), type(m)) for n, m in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    pm = autopar.parallelize(model, "tp=2", kwargs=batch())
    pm.train_step(**batch())
    torch.optim.SGD(pm.parameters(), lr=1.0).step()
    pm.eval()
    pm(**batch())
    for n, t in model.state_dict(keep_vars=True).items():
        value, place, flag = before[n]
        assert torch.equal(t, value) and t.data_ptr() == place and t.requires_grad == flag and t.grad is None
    assert {n: (m.training, set(m.__dict__), type(m)) for n, m in model.named_modules()} == attributes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks


@pytest.mark.parametrize(
    ("world", "function"),
    [
        (2, structured), (4, outputs), (2, modes), (4, shapes), (2, at_first_call), (4, side_by_side), (2, untouched),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_on_ranks(ranks: Ranks, world: int, function: Callable[[], None]) -> None:
    ranks.run(world, function)


def test_one_process_without_distributed() -> None:
    model = seeded(Lm)
    want, grads = stepped(model, batch())
    for mesh in ("dp=1", "dp=1,tp=1", "tp=1"):
        pm = autopar.parallelize(model, mesh, kwargs=batch())
        assert float(pm.train_step(**batch())) == pytest.approx(want, rel=1e-6)
        same(pm.full_gradients(), grads)
        assert not dist.is_initialized()


def test_batch_dims_by_name_and_in_order() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.mlp(x.transpose(0, 1) + table)

    model, x, table = seeded(Turned), features(6, 4, WIDTH), features(6, WIDTH)
    for dims in ({"x": 1, "table": None}, [1, None]):
        pm = autopar.parallelize(model, "dp=1", args=(x, table), loss=squares, batch_dims=dims)
        assert float(pm.train_step(x, table)) == pytest.approx(float(squares(model(x, table).detach())), rel=1e-6)
