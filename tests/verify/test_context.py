"""On cp no op reads scores of all queries against all keys; masks and biases of attention are none."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.compile import lower
from autopar.errors import AutoparError
from autopar.ir import edit, ops
from autopar.ir.layout import R
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.rules.arguments import arguments
from autopar.rules.table import aten
from autopar.runtime.ring import whole_attention
from autopar.verify.context import check_context
from tests.context.models import HEADS, Attend, Biased, Cross, D, Documents, Heads, Pooled, Sink, Window, Written, rows


class Detached(Heads):
    """Keys and values are rounded and take no gradient, and the probabilities are read twice: not recognized."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        k, v = (y.detach().bfloat16().to(q.dtype) for y in (k, v))
        p = self.scores(q, k).softmax(-1)
        return x + self.join(p @ v) * p.amax(-1).mean(1).unsqueeze(-1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, H, S, S]."""
        return q @ k.transpose(-1, -2)


class Broadcast(Detached):
    """The same without a product: queries against keys element by element."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, H, S, S]."""
        return -(q.unsqueeze(3) - k.unsqueeze(2)).abs().sum(-1)


class Content(Heads):
    """A bias that queries and distances make, each distance for each query: queries times keys, but a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Parameter(torch.linspace(-1, 1, D // HEADS * 32).view(32, D // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        place = torch.arange(x.shape[1])
        apart = (place[:, None] - place[None] + 16).expand(*q.shape[:2], -1, -1)
        bias = (q @ self.near.t()).gather(-1, apart)
        return x + self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


class Regular(Biased):
    """A learned bias that the loss reads, too."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.biases(x.shape[1])
        return x + self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=bias)) + bias.square().mean()


class Grid(nn.Module):
    """Attention along rows of a grid, then along columns; both dims are positions of one value, and no scores."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = Attend(is_causal=False), Attend(is_causal=False)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, d = x.shape
        x = self.rows(x.reshape(b * h, w, d)).view(b, h, w, d).transpose(1, 2)
        return self.columns(x.reshape(b * w, h, d)).view(b, w, h, d).mean(1)


X = rows()


def program(model: nn.Module, args: Any = (X,), kind: str = "ring", after: str = "reshard") -> Program:
    strategy = f"context_parallel={kind}"
    return lower(model, args, {}, Mesh.parse("cp=2"), strategy, after=after, loss=lambda out: out.sum())


@pytest.mark.parametrize("make", [Detached, Broadcast])
def test_scores_that_every_rank_makes_of_gathered_keys_are_refused(make: Any) -> None:
    with pytest.raises(AutoparError) as caught:
        program(make())
    message = str(caught.value)
    assert caught.value.slug == "square-scores" and "[2, 4, 16, 16] (dims [2, 3])" in message
    assert "test_context.py" in message and "-> " in message and "scaled_dot_product_attention" in message


KEEP, NUMBERS = torch.ones(2, 16, dtype=torch.bool), torch.arange(16).repeat(2, 1) // 5
FINE: list[tuple[Any, tuple[Any, ...]]] = [
    (Biased, (rows(),)),
    (Regular, (rows(),)),
    (Content, (rows(),)),
    (Documents, (rows(), NUMBERS)),
    (Window, (rows(), KEEP, NUMBERS)),
    (Attend, (rows(), torch.zeros(2, 1, 16, 16))),
    (lambda: Written("add"), (rows(), KEEP)),
    (Cross, (rows(), rows(9, seed=2))),
    (Pooled, (rows(),)),
    (Grid, (rows(64).view(2, 8, 8, D),)),
]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize(("make", "args"), FINE)
def test_masks_biases_and_other_values_with_two_dims_of_positions_are_no_scores(
    make: Any, args: tuple[Any, ...], kind: str
) -> None:
    for after in ("context-parallel", "reshard"):
        check_context(program(make(), args, kind, after))


def attention_of(program: Program) -> tuple[fx.Graph, fx.Node]:
    found = ((g, n) for _, g in program.graphs() for n in g.nodes if n.target in ops.ATTENTION)
    return next(found)


@pytest.mark.parametrize("after", ["context-parallel", "reshard"])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_an_attention_that_is_put_back_as_it_was_written_is_found(kind: str, after: str) -> None:
    """All that ``attention`` stands for is written out in its place, with the layouts that it had."""
    broken = program(nn.Sequential(Attend(is_causal=False), Attend(is_causal=False)), kind=kind, after=after).clone()
    graph, node = attention_of(broken)
    known = arguments(node)
    with graph.inserting_before(node):
        turned = edit.call(graph, aten.permute.default, (known["k"], [0, 1, 3, 2]), like=node)
        scores = edit.call(graph, aten.matmul.default, (known["q"], turned), like=node)
        made = edit.call(graph, aten.softmax.int, (scores, -1), like=node)
        out = edit.call(graph, aten.matmul.default, (made, known["v"]), like=node)
    for new in (turned, scores, made, out):
        new.meta.update(layout=node.meta["layout"], diff=True)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    with pytest.raises(AutoparError, match="square-scores"):
        check_context(broken)


def test_an_attention_that_every_rank_computes_whole_is_found() -> None:
    broken = program(Attend()).clone()
    _, node = attention_of(broken)
    node.meta["layout"] = node.meta["layout"].having("cp", R)
    with pytest.raises(AutoparError, match="whole-attention"):
        check_context(broken)


@pytest.mark.parametrize("model", [Written(cap=2.0), Sink()])
def test_scores_inside_of_an_attention_that_no_kernel_takes_are_found(model: nn.Module) -> None:
    args = (rows(), KEEP) if isinstance(model, Written) else (rows(),)
    broken = program(model, args, "ulysses", "localize").clone()
    check_context(broken)
    (graph, node) = next((g, n) for _, g in broken.graphs() for n in g.nodes if n.target is whole_attention)
    known = arguments(node)
    node.target, node.args = ops.attention, (known["q"], known["k"], known["v"])
    node.kwargs = {n: known[n] for n in ("sink", "cap", "mask")}
    with pytest.raises(AutoparError, match="square-scores"):
        check_context(broken)


def test_without_a_context_axis_nothing_is_asked() -> None:
    lower(Detached(), (rows(),), {}, Mesh.parse("tp=2"), loss=lambda out: out.sum())
