"""Attention written out by hand is recognized where it is the same, and only there."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.compile import lower
from autopar.ir import ops
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.rules.arguments import arguments
from tests.context.models import Columns, D, Heads, Sink, Written, rows


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
    attention = exact(Written(hide, lowest), kept())
    assert attention["mask"] is not None and attention["fill"] is not None and attention["scale"] == 0.5


def exact(model: nn.Module, *more: Tensor) -> dict[str, object]:
    """The attention of a model, which is traced; its values and the gradients of parameters are the model's."""
    torch.manual_seed(0)
    model, x = model.double(), rows().double()
    program = traced(model, x, *more)
    (attention,) = found(program)
    want = model(x, *more)
    grads = torch.autograd.grad(want.square().sum(), list(model.parameters()))
    params = dict(model.named_parameters())
    got = evaluate(program, {n: params[n] if n in params else torch.tensor(0) for n in program.params}, [x, *more])[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    made = torch.autograd.grad(got.square().sum(), list(model.parameters()))
    torch.testing.assert_close(made, grads, rtol=1e-12, atol=1e-12)
    return attention


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


class Temperature(Heads):
    """The scores are scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2) * self.by / torch.sqrt(torch.full((), 2.0))
        return self.join(scores.softmax(-1) @ v)


def test_a_causal_mask_of_numbers_goes_into_the_op() -> None:
    (attention,) = found(traced(Causal(), rows()))
    assert attention["is_causal"] and attention["mask"] is None and attention["fill"] is None
    assert attention["scale"] == 0.25


@pytest.mark.parametrize("model", [Weights, Columns], ids=lambda m: m.__name__)
def test_what_is_something_else_stays(model: type[nn.Module]) -> None:
    made, x = model(), torch.zeros(2, 6, D)
    program = lower(made, (x,), {}, Mesh.parse("dp=1"), after="trace")
    assert not found(program)


def test_numbers_that_are_tensors_scale_the_queries() -> None:
    exact(Temperature())


@pytest.mark.parametrize("cap", [0.5, 3.0])
def test_a_soft_cap_goes_into_the_op(cap: float) -> None:
    assert exact(Written(cap=cap), kept())["cap"] == cap


@pytest.mark.parametrize("shift", ["", "max"])
def test_a_score_that_is_no_keys_goes_into_the_op(shift: str) -> None:
    attention = exact(Sink(shift=shift))
    assert attention["sink"] is not None and attention["is_causal"]


def seen(diagonal: int = 0) -> Tensor:
    return torch.ones(16, 16, dtype=torch.bool).tril(diagonal)


class By(Heads):
    """``weigh`` makes probabilities of the scores."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(self.weigh(q @ k.transpose(-1, -2)).to(v.dtype) @ v)


def same(weigh: Callable[[Tensor], Tensor], dtype: torch.dtype, close: float) -> Program:
    """Whether what is traced gives what the model gives."""
    torch.manual_seed(0)
    model, x = By(weigh).to(dtype), rows().to(dtype)
    program, params = traced(model, x), dict(model.named_parameters())
    got = evaluate(program, {n: params[n] if n in params else torch.tensor(0) for n in program.params}, [x])[0]
    torch.testing.assert_close(got, model(x), rtol=close, atol=close)
    return program


@pytest.mark.parametrize(
    "weigh",
    [
        lambda s: (s + seen()).softmax(-1),
        lambda s: (s * -0.35).masked_fill(~seen(), -math.inf).softmax(-1),
        lambda s: (s + torch.where(seen(), 0, -10000)).softmax(-1),
        lambda s: (s + torch.where(seen(), 0, -3).to(s.dtype)).softmax(-1),
        lambda s: s.masked_fill(~seen(), -2.0).softmax(-1),
        lambda s: torch.where(seen(), s, -2.0).softmax(-1),
        lambda s: s.masked_fill(~seen()[:1], -math.inf).softmax(-1),
    ],
    ids=["bool added", "negative scale", "integers", "cast integers", "weak fill", "weak where", "one row"],
)
def test_what_looks_like_causal_attention(weigh: Callable[[Tensor], Tensor]) -> None:
    same(weigh, torch.float64, 1e-12)


@pytest.mark.parametrize(
    "weigh",
    [
        lambda s: (s + seen() * 0.5 * torch.ones(())).softmax(-1),
        lambda s: s.float().masked_fill(~seen(-1), torch.finfo(torch.float32).min).softmax(-1),
        lambda s: (s.float() + torch.where(seen(-1), 0.0, -1e4).to(s.dtype)).softmax(-1),
    ],
    ids=["wide mask", "wide fill", "wide scores"],
)
def test_scores_that_are_wider_than_the_values(weigh: Callable[[Tensor], Tensor]) -> None:
    assert found(same(weigh, torch.bfloat16, 2e-2))


@pytest.mark.parametrize("bound", [lambda s: s, lambda s: torch.tanh(s / 2) * 2], ids=["plain", "cap"])
def test_queries_that_see_nothing_are_written_over(bound: Callable[[Tensor], Tensor]) -> None:
    (known,) = found(
        same(lambda s: bound(s).masked_fill(~seen(-1), -math.inf).softmax(-1).nan_to_num(0.0), torch.float64, 1e-12)
    )
    assert known["fill"] is None and known["mask"] is not None
