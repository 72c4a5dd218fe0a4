import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import I, P, Piece, Shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.pipeline import run
from autopar.rules.relation import join
from autopar.trace import trace
from tests.passes import models
from tests.passes.models import CASES, planned

TP, SEQUENCE = "data-parallel,tensor-parallel", "data-parallel,tensor-parallel{sequence}"


def kinds(program: Program, axis: str = "tp") -> dict[str, object]:
    return {name: p.layout[axis] for name, p in program.params.items()}


@pytest.mark.parametrize("pipeline", (TP, SEQUENCE))
@pytest.mark.parametrize("name", CASES)
def test_every_weight_of_a_product_is_shared_out(name, pipeline):
    program = planned(name, "tp=2", pipeline)
    whole = {
        n for n, p in program.params.items() if p.layout["tp"] == I and len(p.spec.shape) == 2 and p.kind == "parameter"
    }
    assert whole == set()


@pytest.mark.parametrize("name", CASES)
def test_no_weight_is_gathered(name):
    program = planned(name, "tp=2", f"{TP},reshard")
    for _, graph in program.graphs():
        for node in graph.nodes:
            if node.target is ops.convert and "param" in node.args[0].meta and node.args[3] != P:
                assert not isinstance(node.args[2], Shard), node.format_node()


def test_products_with_a_bias_are_column_and_row_products_too():
    """One sum of a layer's result and no gather of what is inside; the bias is added on one rank (Megatron-LM)."""
    program = planned("mlp", "tp=2", f"{TP},reshard")
    down, bias = (kinds(program)[f"down.{n}"] for n in ("weight", "bias"))
    assert isinstance(down, Shard) and down.dim == 1 and isinstance(bias, Shard)
    moved = [n.args[2:4] for _, g in program.graphs() for n in g.nodes if n.target is ops.convert]
    assert [dst for src, dst in moved if isinstance(src, Shard)] == [P] and (P, I) in moved


def test_a_fused_weight_is_shared_out_in_segments():
    half = Piece(32, 4, 8)
    assert kinds(planned("gated", "tp=4", TP))["gate_up.weight"] == Shard(0, join([half, half]))
    assert kinds(planned("fused", "tp=2", TP))["qkv.weight"] == Shard(0, join([Piece(16, 2, 8)] * 3))
    assert kinds(planned("fused-grouped", "tp=2", TP))["qkv.weight"] == Shard(
        0, join([Piece(16, 2, 8), *[Piece(8, 2, 4)] * 2])
    )


def test_fewer_key_heads_than_ranks_split_the_axis():
    program = planned("grouped", "dp=2,tp=4", f"{TP},reshard")
    assert program.mesh.axes == (("dp", 2), ("tp0", 2), ("tp1", 2))
    assert str(program.mesh) == "dp=2,tp=4"
    query, key = program.params["q.weight"].layout, program.params["k.weight"].layout
    assert isinstance(query["tp0"], Shard) and isinstance(query["tp1"], Shard)
    assert isinstance(key["tp0"], Shard) and key["tp1"] == I


class Heads(nn.Module):
    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.attn = models.Grouped(heads, groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x)


@pytest.mark.parametrize(
    ("heads", "groups", "ways", "fits"),
    [(4, 4, 8, "1, 2, 4"), (4, 4, 3, "1, 2, 4"), (8, 2, 3, "1, 2, 4, 8"), (4, 1, 8, "1, 2, 4")],
)
def test_heads_that_do_not_divide_are_refused_with_what_would(heads, groups, ways, fits):
    module = Heads(heads, groups)
    program = trace(module, (torch.randn(2, 6, 16),), {}, mesh=Mesh.parse(f"tp={ways}"), loss=models.squares).program
    with pytest.raises(AutoparError) as caught:
        run(program, TP)
    assert caught.value.slug == "indivisible-dim"
    assert "attn" in caught.value.message and f"tp={ways}" in caught.value.message
    assert f"tp in {fits}" in (caught.value.fix or "")


def test_outputs_are_whole():
    program = planned("fused-tied", "dp=2,tp=2", f"{SEQUENCE},reshard")
    assert [n.meta["layout"]["tp"] for n in program.graph.output_node().args[0]] == [I] * len(program.outputs)


def test_with_sequence_norms_hold_their_positions():
    program = planned("fused-tied", "tp=2", f"{SEQUENCE},reshard")
    norms = [n for _, g in program.graphs() for n in g.nodes if "layer_norm" in str(n.target)]
    assert norms and {str(n.meta["layout"]["tp"]) for n in norms} == {"S(1)"}


def test_one_rank_changes_nothing():
    program = planned("mlp", "dp=2,tp=1", f"{TP},reshard")
    assert all(a == "dp" for p in program.params.values() for a, _ in p.layout.types)


class Merged(nn.Module):
    """A frozen weight with an adapter added into it, and a scale of its rows."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(out, wide), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(4, wide)), nn.Parameter(torch.randn(out, 4))
        self.scale = nn.Parameter(torch.ones(out, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.base + 2 * self.up @ self.down) * self.scale)


class Deep(nn.Module):
    """A convolution of each channel by itself between two that mix them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.own, self.out = nn.Conv1d(8, 16, 1), nn.Conv1d(16, 16, 3, groups=16), nn.Conv1d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.own(self.wide(x)))


@pytest.mark.parametrize(
    ("module", "x"),
    [(nn.Sequential(Merged(16, 32), nn.GELU(), Merged(32, 16)), torch.randn(2, 6, 16)), (Deep(), torch.randn(2, 8, 6))],
    ids=["merged", "deep"],
)
def test_computed_weights_and_single_channels_are_shared_out_and_stay_so(module, x):
    program = run(trace(module, (x,), {}, mesh=Mesh.parse("tp=2"), loss=models.squares).program, f"{TP},reshard")
    weights = {n: p.layout["tp"] for n, p in program.params.items() if len(p.spec.shape) > 1}
    assert all(isinstance(t, Shard) for t in weights.values()), weights
    moved = [n for n in program.graph.nodes if n.target is ops.convert and isinstance(n.args[2], Shard)]
    gathers = [n for n in moved if n.args[3] != P]  # a bias that is padded with zeros goes nowhere
    assert not any(n.args[0].meta["spec"].shape[0] != 2 for n in gathers), gathers  # of rows only, never of weights
