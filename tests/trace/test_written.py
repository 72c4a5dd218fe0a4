"""Attention written by hand from random steps: what is traced gives the model's values and gradients, on cp as well."""

import math
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor, nn

from autopar.compile import lower
from autopar.ir import ops
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from tests.context.models import HEADS, Heads, rows

LENGTH = 16
FILLS = (-math.inf, -1e4, -2.0, torch.finfo(torch.float64).min)


def causal() -> Tensor:
    """Made anew at each call, as models do: a trace would take one that is there for any numbers."""
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


class Steps(Heads):
    """Scores, a few steps in random order, an end, and how the products are written."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        pick, made = Random(seed), torch.Generator().manual_seed(seed)
        self.steps = [(pick.choice(list(self.known())), pick.choice(FILLS)) for _ in range(pick.randint(1, 5))]
        self.by = pick.choice([2.0, 0.5, -1.5])
        self.end = pick.choice(["", "", "sink", "first sink", "sink max", "max", "nan"])
        self.form = pick.choice(["matmul", "einsum", "shared"])
        self.bias, self.row = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH)), nn.Parameter(torch.randn(1, 1, LENGTH))
        self.sink, self.temperature = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.one = nn.Parameter(torch.rand(()) + 0.5)
        self.register_buffer("some", torch.rand(1, HEADS, LENGTH, LENGTH, generator=made) > 0.4)
        self.register_buffer("keep", torch.ones(2, LENGTH, dtype=torch.bool))
        self.keep[0, :3], self.keep[1, -4:] = False, False

    def known(self) -> dict[str, Callable[[Tensor, float], Tensor]]:
        """Steps by name; those that hide take the number that they hide by."""

        def number(s: Tensor, value: float) -> Tensor:
            return torch.full((), value, dtype=s.dtype)

        return {
            "times": lambda s, _: s * self.by,
            "over": lambda s, _: s / self.by,
            "cap": lambda s, _: torch.tanh(s / abs(self.by)) * abs(self.by),
            "bound": lambda s, _: torch.tanh(s),
            "bias": lambda s, _: s + self.bias,
            "less": lambda s, _: s - self.bias[:1],
            "row": lambda s, _: s + self.row,
            "temperature": lambda s, _: s * self.temperature,
            "one": lambda s, _: s / self.one,
            "fill": lambda s, by: s.masked_fill(~self.some, by),
            "where": lambda s, by: torch.where(self.some, s, number(s, by)),
            "added": lambda s, by: s + torch.where(self.some, number(s, 0.0), number(s, by)),
            "causal": lambda s, by: torch.where(causal(), s, number(s, by)),
            "later": lambda s, by: s.masked_fill(~causal(), by),
            "near": lambda s, by: s + torch.where(causal() & ~causal().tril(-5), number(s, 0.0), number(s, by)),
            "keep": lambda s, by: s.masked_fill(~self.keep[:, None, None, :], by),
        }

    def weights(self, s: Tensor) -> Tensor:
        """The probabilities of scores."""
        known = self.known()
        for name, by in self.steps:
            s = known[name](s, by)
        sink = self.sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        if "sink" in self.end:
            s = torch.cat([sink, s] if "first" in self.end else [s, sink], -1)
        if "max" in self.end:
            s = s - s.max(-1, keepdim=True).values
        p = s.softmax(-1)
        if "sink" in self.end:
            p = p[..., 1:] if "first" in self.end else p[..., :-1]
        return p.nan_to_num() if self.end == "nan" else p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.form == "einsum":
            p = self.weights(torch.einsum("bhid,bhjd->bhij", q, k))
            return x + self.join(torch.einsum("bhij,bhjd->bhid", p, v))
        return x + self.join(self.weights(q @ (k[:, :1] if self.form == "shared" else k).transpose(-1, -2)) @ v)


def error(model: Steps, mesh: str) -> tuple[float, int]:
    """max|Δ| of the result and of gradients, over the largest of each; how many attentions were recognized."""
    x, params = rows(LENGTH).double(), dict(model.named_parameters())
    program = lower(model, (x,), {}, Mesh.parse(mesh), after="trace", loss=lambda out: out.sum(), train=True)
    held = {**params, **dict(model.named_buffers())}
    made = evaluate(program, {n: held.get(n, torch.tensor(0)) for n in program.params}, [x])[0]
    results = (made, model(x))
    grads = [torch.autograd.grad(y.square().sum(), list(params.values()), allow_unused=True) for y in results]
    pairs = [(made.detach(), results[1].detach())]
    pairs += [(a if a is not None else torch.zeros_like(b), b) for a, b in zip(*grads) if b is not None]
    largest = max(float(b.abs().max()) for _, b in pairs[1:])
    apart = [float((a - b).abs().max()) / (largest if i else float(b.abs().max())) for i, (a, b) in enumerate(pairs)]
    return max(apart), sum(n.target is ops.attention for _, g in program.graphs() for n in g.nodes)


@pytest.mark.parametrize("mesh", ["dp=1", "cp=2"])
def test_the_same_values_and_gradients(mesh: str) -> None:
    """Models whose own result is no number are left out."""
    compared, recognized = 0, 0
    for seed in range(30):
        torch.manual_seed(seed)
        model = Steps(seed).double()
        if not model(rows(LENGTH).double()).isfinite().all():
            continue
        apart, many = error(model, mesh)
        assert apart < 1e-11, (seed, apart, model.steps, model.end, model.form)
        compared, recognized = compared + 1, recognized + many
    assert compared > 15 and recognized > 3, (compared, recognized)


@pytest.mark.parametrize(
    ("steps", "end"),
    [
        ([("fill", -math.inf), ("causal", FILLS[3])], ""),  # all that a query may see is hidden before
        ([("added", FILLS[3]), ("causal", FILLS[3])], ""),
        ([("causal", -2.0)], "sink"),
        ([("near", -2.0)], ""),
        ([("near", FILLS[3])], "sink"),
        ([("keep", -math.inf), ("near", FILLS[3])], ""),
    ],
)
@pytest.mark.parametrize("mesh", ["dp=1", "cp=2"])
def test_numbers_that_hide_only_as_far_as_they_go(steps: list[tuple[str, float]], end: str, mesh: str) -> None:
    torch.manual_seed(0)
    model = Steps(0).double()
    model.steps, model.end, model.form = steps, end, "matmul"
    model.some[:, :, :, :4] = False
    apart, many = error(model, mesh)
    assert apart < 1e-11 and many == 1, (apart, many)
