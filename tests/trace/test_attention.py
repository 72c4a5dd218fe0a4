"""Attention written out by hand is recognized where it is the same, and only there."""

import pytest
import torch
from torch import Tensor, nn

from autopar.compile import lower
from autopar.ir import ops
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.rules.arguments import arguments
from tests.context.models import HEADS, D, Heads, Written, rows


def traced(model: nn.Module, *args: Tensor) -> Program:
    return lower(model, args, {}, Mesh.parse("dp=1"), after="trace", loss=lambda out: out.sum(), train=True)


def found(program: Program) -> list[dict[str, object]]:
    return [arguments(n) for _, g in program.graphs() for n in g.nodes if n.target is ops.attention]


def kept(seed: int = 0) -> Tensor:
    """A query that sees nothing: the first keys of one row are padding."""
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[0, :4] = False
    return keep


@pytest.mark.parametrize("lowest", [None, -1e4, -2.0])
@pytest.mark.parametrize("hide", ["where", "fill", "add"])
def test_the_same_values_and_gradients(hide: str, lowest: float | None) -> None:
    torch.manual_seed(0)
    model, x = Written(hide, lowest).double(), rows().double()
    program = traced(model, x, kept())
    (attention,) = found(program)
    assert attention["mask"] is not None and attention["fill"] is not None and attention["scale"] == 0.5
    want = model(x, kept())
    grads = torch.autograd.grad(want.square().sum(), list(model.parameters()))
    params = dict(model.named_parameters())
    got = evaluate(program, {n: params[n] if n in params else torch.tensor(0) for n in program.params}, [x, kept()])[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    made = torch.autograd.grad(got.square().sum(), list(model.parameters()))
    torch.testing.assert_close(made, grads, rtol=1e-10, atol=1e-10)


class Causal(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = (q @ k.transpose(-1, -2)) * 0.25
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.join(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v)


class Weights(Heads):
    """The probabilities are an output too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(x)
        p = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.join(p @ v), p


class Sink(Heads):
    """A score that is no key's."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2)
        sink = self.sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return self.join(torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v)


class Temperature(Heads):
    """The scores are scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join((q @ k.transpose(-1, -2) * self.by).softmax(-1) @ v)


class Columns(Heads):
    """The softmax runs over queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join((q @ k.transpose(-1, -2)).softmax(-2) @ v)


def test_a_causal_mask_of_numbers_goes_into_the_op() -> None:
    (attention,) = found(traced(Causal(), rows()))
    assert attention["is_causal"] and attention["mask"] is None and attention["fill"] is None
    assert attention["scale"] == 0.25


@pytest.mark.parametrize("model", [Weights, Sink, Temperature, Columns], ids=lambda m: m.__name__)
def test_what_is_something_else_stays(model: type[nn.Module]) -> None:
    made, x = model(), torch.zeros(2, 6, D)
    program = lower(made, (x,), {}, Mesh.parse("dp=1"), after="trace")
    assert not found(program)


def test_a_soft_cap_stays() -> None:
    assert not found(traced(Written(cap=3.0), rows(), kept()))
