"""What a forward changes outside of the model: globals, attributes of classes, their containers."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.trace import trace

X = torch.linspace(-2.0, 2.0, 32).reshape(4, 8)
CALLS = 0
SAID = False
TABLE: dict[str, float] = {"scale": 1.0}
LAST: Any = None


class Net(nn.Module):
    """A layer whose output a subclass scales."""

    def __init__(self) -> None:
        super().__init__()
        self.i = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.i(x) * self.scale(x)).mean()

    def scale(self, x: Tensor) -> Any:
        return 1.0


class Counted(Net):
    def scale(self, x: Tensor) -> Any:
        global CALLS
        CALLS += 1
        return float(CALLS)


class OfClass(Net):
    calls: ClassVar[int] = 0

    def scale(self, x: Tensor) -> Any:
        type(self).calls += 1
        return 1.0 if OfClass.calls == 1 else 2.0


class Held(Net):
    def scale(self, x: Tensor) -> Any:
        TABLE["scale"] *= 2
        return TABLE["scale"]


class Kept(Net):
    def scale(self, x: Tensor) -> Any:
        global LAST
        before, LAST = LAST, x
        return 1.0 if before is None else before.sum()


class Nested(Net):
    def scale(self, x: Tensor) -> Any:
        def count() -> float:
            global CALLS
            CALLS += 1
            return float(CALLS)

        return count()


class Layers(Net):
    """The same in layers that are traced once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def scale(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        out: Tensor = self.i(x) * CALLS
        return out


class OnlyCounted(Net):
    def scale(self, x: Tensor) -> Any:
        global CALLS, SAID, LAST
        CALLS += 1
        SAID = True
        LAST = x
        return 3.0


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Every test begins with what the file says."""
    global CALLS, SAID, LAST
    CALLS, SAID, LAST = 0, False, None
    OfClass.calls = 0
    TABLE["scale"] = 1.0


def notes(model: nn.Module) -> tuple[str, ...]:
    return trace(model, (X,), {}, mesh=Mesh.parse("dp=1")).notes


@pytest.mark.parametrize("kind", [Counted, OfClass, Held, Kept, Nested, Layers])
def test_what_the_next_call_computes_with_is_refused(kind: type[Net]) -> None:
    with pytest.raises(AutoparError) as e:
        notes(kind())
    assert e.value.slug == "python-state"
    names = {OfClass: "OfClass.calls", Held: "TABLE", Kept: "LAST"}
    assert names.get(kind, "CALLS") in str(e.value)
    assert (CALLS, LAST, OfClass.calls, TABLE) == (0, None, 0, {"scale": 1.0}), "as before the trace"


def test_what_is_only_written_is_said() -> None:
    said = notes(OnlyCounted())
    assert [any(f"test_outside.{n}: the forward changes it" in s for s in said) for n in ("CALLS", "SAID", "LAST")] == [
        True
    ] * 3
    assert (CALLS, SAID, LAST) == (1, True, None), "as after one call, but for a tensor of the trace"


def test_a_model_that_changes_nothing_outside_has_no_notes() -> None:
    assert notes(Net()) == ()
