"""What calls leave in attributes (tables that are made once, largest sizes, caches) is met by later ones."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.trace import trace

LENGTHS = (4, 6, 3, 4)  # of calls, one after the other


def table(n: int) -> Tensor:
    """What rotary positions and the like keep."""
    return torch.outer(torch.arange(n).float(), torch.arange(1.0, 9.0)).cos()


class Net(nn.Module):
    """A product, and what it remembers."""

    inv: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.o = nn.Linear(8, 8)
        self.register_buffer("inv", torch.arange(1.0, 9.0))
        self.size = 0
        self.made: Any = None
        self.set_up()

    def set_up(self) -> None:
        """What kinds of it have before the first call."""

    def forward(self, x: Tensor) -> Tensor:
        """One float."""
        return (self.o(x) * self.remembered(x)).pow(2).mean()

    def remembered(self, x: Tensor) -> Any:
        """What the output is multiplied by."""
        raise NotImplementedError


class Grown(Net):
    """A table of a buffer's numbers that is made anew when it is too short."""

    def remembered(self, x: Tensor) -> Any:
        if self.made is None or x.shape[1] > self.size:
            self.size = x.shape[1]
            self.made = torch.outer(torch.arange(self.size).float(), self.inv).cos()
        return self.made[: x.shape[1]]


class Mask(Net):
    """A mask that is made anew for every other length."""

    def remembered(self, x: Tensor) -> Any:
        if self.made is None or self.made.shape[0] != x.shape[1]:
            self.made = torch.ones(x.shape[1], x.shape[1]).tril() / x.shape[1]
        return self.made @ x


class ByLength(Net):
    """A table for each length, in a dict."""

    def set_up(self) -> None:
        self.made = {}

    def remembered(self, x: Tensor) -> Any:
        if x.shape[1] not in self.made:
            self.made[x.shape[1]] = table(x.shape[1])
        return self.made[x.shape[1]]


class Registered(Net):
    """A buffer that the forward registers, longer when it must."""

    def set_up(self) -> None:
        del self.made
        self.register_buffer("made", table(3), persistent=False)

    def remembered(self, x: Tensor) -> Any:
        if x.shape[1] > len(self.made):
            self.register_buffer("made", table(x.shape[1]), persistent=False)
        return self.made[: x.shape[1]]


class Property(Net):
    """A property that is computed once."""

    @functools.cached_property
    def known(self) -> Tensor:
        """A table of the longest length."""
        return table(6)

    def remembered(self, x: Tensor) -> Any:
        return self.known[: x.shape[1]]


class First(Net):
    """The length of the first call, for ever."""

    def remembered(self, x: Tensor) -> Any:
        if not self.size:
            self.size = x.shape[1]
        return float(self.size)


class Largest(Net):
    """The largest length so far, of which the output depends: what a program was made with goes out of date."""

    def remembered(self, x: Tensor) -> Any:
        if x.shape[1] > self.size:
            self.size = x.shape[1]
        return float(self.size)


class LargestTable(Grown):
    """The same with a table in it."""

    def remembered(self, x: Tensor) -> Any:
        return super().remembered(x) * self.size


@functools.lru_cache
def cached(n: int) -> Tensor:
    """A table that the code remembers, not the module."""
    return table(n)


KNOWN: dict[int, Tensor] = {}


class Function(Net):
    """A function with a cache."""

    def remembered(self, x: Tensor) -> Any:
        return cached(x.shape[1])


class Global(Net):
    """A container of the file."""

    def remembered(self, x: Tensor) -> Any:
        if x.shape[1] not in KNOWN:
            KNOWN[x.shape[1]] = table(x.shape[1])
        return KNOWN[x.shape[1]]


class Method(Net):
    """A method with a cache, in a list of equal layers."""

    @functools.lru_cache(maxsize=4)  # noqa: B019  (as models have it)
    def known(self, n: int) -> Tensor:
        """A table."""
        return table(n)

    def remembered(self, x: Tensor) -> Any:
        return self.known(x.shape[1])


def inputs(length: int) -> Tensor:
    """Rows of that length."""
    return torch.linspace(-1.0, 1.0, 2 * length * 8).reshape(2, length, 8)


KINDS = [
    Grown, Mask, ByLength, Registered, Property, First, Largest, LargestTable, Function, Global, Method,
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "meta"), [*((kind, False) for kind in KINDS), (Registered, True), (LargestTable, True)]
)
def test_calls_are_those_of_eager_mode(kind: Callable[[], Net], meta: bool) -> None:
    model, same, weights = kind(), kind(), {n: p.detach().clone() for n, p in kind().named_parameters()}
    if meta:
        model.o.to("meta")
    before = {n: v for n, v in model.__dict__.items() if n[0] != "_"}
    pm = autopar.parallelize(model, "dp=1", args=(inputs(5),))
    with torch.no_grad():
        for name, p in pm.named_parameters():
            p.copy_(weights[name])
    for length in LENGTHS:
        loss, want = pm.train_step(inputs(length)), same(inputs(length))
        torch.testing.assert_close(loss, want.detach(), msg=f"length {length}")
    if not meta:
        assert {n: v for n, v in model.__dict__.items() if n[0] != "_"} == before
        torch.testing.assert_close(model(inputs(4)), kind()(inputs(4)))  # nothing of the traces is remembered


def test_a_trace_from_what_a_call_left_has_the_ops_that_made_it() -> None:
    model = Grown()
    first = trace(model, (inputs(6),), {}, mesh=Mesh.parse("dp=1"))
    again = trace(model, (inputs(4),), {}, mesh=Mesh.parse("dp=1"), start=first.left)
    assert again.left is None and model.made is None
    values = dict(model.named_parameters()) | {"inv": model.inv} | again.constants
    results = evaluate(again.program, values, [inputs(4)])
    torch.testing.assert_close(results[-1], Grown()(inputs(4)))


class Modes(Net):
    """What training sets, evaluation reads; beside it stand a tensor and what cannot be copied."""

    layers: nn.ModuleList

    def set_up(self) -> None:
        self.layers, self.made = nn.ModuleList(), 1.0

    def remembered(self, x: Tensor) -> Any:
        if not self.training:
            return self.made
        self.made, self.last, self.odd = 2.0, x.detach(), (i for i in ())
        return 1.0


class Layered(Modes):
    """The same in a model whose layers are traced once."""

    def set_up(self) -> None:
        super().set_up()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Modes, Layered])
def test_what_one_kind_of_call_leaves_another_meets(kind: Callable[[], Net]) -> None:
    torch.manual_seed(0)
    model = kind()
    same, x = copy.deepcopy(model), inputs(4)
    with pytest.warns(UserWarning, match="odd: what the forward leaves there cannot be copied"):
        pm = autopar.parallelize(model, "dp=1", args=(x,))
    with torch.no_grad():
        for mode in (True, False, True, False):
            pm.train(mode)
            same.train(mode)
            torch.testing.assert_close(pm(x), same(x))


class Length(Net):
    """The last length, which nobody reads."""

    def remembered(self, x: Tensor) -> Any:
        self.size = x.shape[1]
        return 1.0


@pytest.mark.parametrize("kind", [Length, Mask, Largest])
def test_calls_that_take_turns_are_traced_once_each(kind: Callable[[], Net]) -> None:
    pm = autopar.parallelize(kind(), "dp=1", args=(inputs(4),))
    known = []
    for _ in range(4):
        for length in (4, 6):
            pm(inputs(length))
        known.append(len(pm._compiler.traces))  # type: ignore[attr-defined]
    assert known[1] == known[-1] <= 4


class Slow(Net):
    """What the first call computes is not what later ones do."""

    def remembered(self, x: Tensor) -> Any:
        warm, self.made = self.made, 2.0
        return warm or 1.0


class OfRows(Net):
    """The mean of the first rows, kept."""

    def remembered(self, x: Tensor) -> Any:
        if self.made is None:
            self.made = x.mean()
        return self.made


class OfWeights(Net):
    """A product of the first weights, kept."""

    def remembered(self, x: Tensor) -> Any:
        if self.made is None:
            self.made = self.o.weight.detach().abs().sum()
        return self.made


class Third(Net):
    """What the first call sets, the second one passes on to the third."""

    def remembered(self, x: Tensor) -> Any:
        factor = 2.0 if self.made else 1.0
        self.made, self.size = self.size, 1
        return factor


class Drawn(Net):
    """Numbers that were drawn once."""

    def remembered(self, x: Tensor) -> Any:
        if self.made is None:
            self.made = torch.rand(8)
        return self.made


@pytest.mark.parametrize("kind", [Slow, OfRows, OfWeights, Third, Drawn])
def test_what_is_not_the_same_for_every_call_is_refused(kind: Callable[[], Net]) -> None:
    with pytest.raises(AutoparError) as caught:
        trace(kind(), (inputs(4),), {}, mesh=Mesh.parse("dp=1"))
    assert caught.value.slug == "python-state"


class Written(Net):
    """A table of a buffer that training writes."""

    def remembered(self, x: Tensor) -> Any:
        if self.training:
            self.inv = self.inv * 2
        elif self.made is None:
            self.made = self.inv + 1
        return 1.0 if self.training else self.made


def test_a_table_of_a_buffer_that_calls_write_is_refused() -> None:
    pm = autopar.parallelize(Written(), "dp=1", args=(inputs(4),))
    pm(inputs(4))
    pm.eval()
    with pytest.raises(AutoparError) as caught:
        pm(inputs(4))
    assert caught.value.slug == "python-state" and "inv" in caught.value.message


def test_a_buffer_of_another_shape_that_nobody_reads_is_refused() -> None:
    class Kept(Net):
        def remembered(self, x: Tensor) -> Any:
            self.inv = x.detach()[0, :2]
            return 1.0

    with pytest.raises(AutoparError) as caught:
        trace(Kept(), (inputs(4),), {}, mesh=Mesh.parse("dp=1"))
    assert caught.value.slug == "input-mutation"
