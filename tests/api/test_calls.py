"""What tells one call from another: callables, plain values, arrays, and which dims are the batch's."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from autopar import AutoparError
from autopar.trace import Structure
from autopar.trace.leaves import key_of
from tests.api.models import WIDTH, features, seeded
from tests.emit.fake import world


class Given(nn.Module):
    """The loss is what the caller says, if anything."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, make: Any = None) -> Tensor:
        y = self.lin(x)
        if isinstance(make, list):
            return y.mean()
        return make(y) if callable(make) else y.mean() * (1 if make is None else float(np.asarray(make).sum()))


class Power:
    """A callable with state."""

    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, y: Tensor) -> Tensor:
        return (y.abs() ** self.power).mean()

    def half(self, y: Tensor) -> Tensor:
        return self(y) / 2


def closure(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda y: (y * scale).sum()


HEAD, SCALES = nn.Linear(WIDTH, 1), {"by": 2.0}


def outer(y: Tensor) -> Tensor:
    return y.sum() * SCALES["by"]


LABELS = torch.tensor([0, 3, 5, 1])


def smoothed(by: float) -> Callable[[Tensor], Tensor]:
    return functools.partial(F.cross_entropy, target=LABELS, label_smoothing=by)


class Weighted(nn.Module):
    """A module without parameters."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(label_smoothing=smoothing)

    def forward(self, y: Tensor) -> Tensor:
        return self.inner(y, LABELS)


@pytest.mark.parametrize("make", [closure, Power, lambda s: Power(s).half, smoothed, Weighted])
def test_values_that_look_alike_are_told_apart(make: Callable[[float], Any]) -> None:
    model, x = seeded(Given), features(4, WIDTH)
    pm = autopar.parallelize(model, "dp=1", (x, make(0.0)), heartbeat=None)
    for value in (make(0.0), make(0.3), make(0.7)):
        assert_close(pm.train_step(x, value), model(x, value).detach())


def test_an_object_is_looked_at_again() -> None:
    model, x = seeded(Given), features(4, WIDTH)
    power, module, bound = Power(2.0), Weighted(0.0), Power(2.0)
    pm = autopar.parallelize(model, "dp=1", (x, power), heartbeat=None)
    for i in range(2):
        for value in (power, module, bound.half):
            assert_close(pm.train_step(x, value), model(x, value).detach())
        traces = len(pm._compiler.traces)  # type: ignore[attr-defined]
        for value in (power, module, bound.half):
            pm.train_step(x, value)
        assert len(pm._compiler.traces) == traces == 3 * (i + 1)  # type: ignore[attr-defined]
        power.power, bound.power, module.inner.label_smoothing = 3.0, 3.0, 0.5


def test_a_global_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(Given), features(4, WIDTH)
    pm = autopar.parallelize(model, "dp=1", (x, outer), heartbeat=None)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(SCALES, "by", scale)
        assert_close(pm.train_step(x, outer), model(x, outer).detach())


def test_a_list_is_no_tuple() -> None:
    model, x = seeded(Given), features(4, WIDTH)
    pm = autopar.parallelize(model, "dp=1", (x, [2.0, 3.0]), heartbeat=None)
    for value in ([2.0, 3.0], (2.0, 3.0)):
        assert_close(pm.train_step(x, value), model(x, value).detach())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.arange(3.0), ["make", "ndarray"]),
        ({1, 2}, ["make", "set"]),
        (torch.Generator(), ["make", "Generator"]),
        (nn.Linear(WIDTH, 1), ["make", "Linear", "parameters"]),
        (functools.partial(nn.Linear(WIDTH, 1).forward), ["make", "partial", "parameters"]),
        (lambda y: HEAD(y).mean(), ["make", "function", "parameters"]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_values_that_no_key_tells_apart(value: Any, words: list[str]) -> None:
    with pytest.raises(AutoparError) as raised:
        autopar.parallelize(seeded(Given), "dp=1", (features(4, WIDTH), value), heartbeat=None)
    assert raised.value.slug == "input-structure" and raised.value.fix
    assert all(w in raised.value.message for w in words)


class Scaled(nn.Module):
    """Two inputs, of which the second is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.lin(x) * w.sum()).mean()


def test_plain_values_that_compare_equal() -> None:
    values = [0.0, -0.0, 0, False, slice(0, 1), slice(0, 1.0), [0], (0,)]
    keys = {Structure.of(Given(), (features(1, WIDTH), v), {})[0].key for v in values}
    assert len(keys) == len(values)
    assert key_of(float("nan")) == key_of(float("nan"))


def test_batch_dims_do_not_change_with_sizes() -> None:
    """What was no batch at the first call is none where it happens to be as long; what was one must stay one."""
    w = torch.tensor([1.0, 3.0])

    def dims(*rows: int) -> list[list[int | None]]:
        model = seeded(Scaled)
        pm = autopar.parallelize(model, "dp=2", (features(rows[0], WIDTH), w), heartbeat=None)
        for n in rows:
            pm.train_step(features(n, WIDTH), w)
        variants = pm._compiler.variants.values()  # type: ignore[attr-defined]
        return [[i.batch_dim for i in v.program.inputs] for v in variants]

    with world(2):
        assert dims(4, 2) == [[0, None], [0, None]]
        with pytest.raises(AutoparError) as raised:
            dims(2, 4)
    assert raised.value.slug == "batch-dims" and "w" in raised.value.message
    assert "first call" in str(raised.value.fix)
