import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost import load, price
from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import I, P, Piece, R, Shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.pipeline import run
from autopar.trace import trace
from tests.passes.models import CASES, planned, traced


def conversions(program: Program) -> list[tuple[object, ...]]:
    return [n.args for _, graph in program.graphs() for n in graph.nodes if n.target is ops.convert]


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_r_and_never_converted(name):
    program = planned(name, "dp=2", "data-parallel,reshard")
    for param in program.params.values():
        assert param.layout["dp"] == (R if param.kind == "parameter" else I)
    assert not [c for c in conversions(program) if "param" in c[0].meta]


@pytest.mark.parametrize("name", ("mlp", "gated", "fused", "grouped"))
def test_a_sum_of_rows_needs_no_communication(name):
    program = planned(name, "dp=2", "data-parallel,reshard")
    assert conversions(program) == []
    out = program.graph.output_node().args[0]
    assert [str(n.meta["layout"]["dp"]) for n in out] == ["S(0)", "P"]


def test_a_mean_over_tokens_needs_only_their_count():
    program = planned("fused-tied", "dp=2", "data-parallel,reshard")
    moved = [(x, dst) for x, _, src, dst in conversions(program) if src == P]
    assert [(x.meta["spec"].shape, x.meta["diff"]) for x, _ in moved if not x.meta["diff"]] == [((), False)]
    assert all(x.meta["spec"].shape == () for x, _, _, _ in conversions(program))


def test_uneven_rows_are_shares_of_the_batch():
    program = run(traced("mlp", "dp=3", (3, 1, 2)), "data-parallel")
    x = next(n for n in program.graph.nodes if "input" in n.meta)
    assert x.meta["layout"]["dp"] == Shard(0, (Piece(6, 6, 1, (3, 1, 2)),))


def test_rows_of_dp_are_those_of_several_ranks_of_ep():
    program = run(traced("mlp", "dp=2,ep=2", (2, 2, 2, 2)), "data-parallel")
    x = next(n for n in program.graph.nodes if "input" in n.meta)
    assert x.meta["layout"]["dp"] == Shard(0, (Piece(8, 2, 4),))
    assert [a for a, _ in x.meta["layout"].types] == ["dp"]


def test_uneven_rows_on_two_axes_are_refused():
    with pytest.raises(AutoparError) as caught:
        run(traced("mlp", "dp=2,ep=2", (2, 1, 1, 1)), "data-parallel")
    assert caught.value.slug == "uneven-rows"


class Statistics(nn.Module):
    """Rows are coupled: each is divided by the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.mean(0, keepdim=True).abs() + 1)


def test_what_couples_rows_is_reduced():
    program = trace(
        Statistics(), (torch.randn(2, 4),), {}, mesh=Mesh.parse("dp=2"), loss=lambda y: (y**2).sum()
    ).program
    rows = conversions(run(program, "data-parallel,reshard"))
    assert [(a, src, dst) for _, a, src, dst in rows if src == P] == [("dp", P, R)]


class Highest(nn.Module):
    """Rows are coupled: of each feature the largest of the batch is taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x - x.amax(0, keepdim=True)


def test_the_largest_of_all_rows_is_reduced_and_gathered_nowhere():
    mesh, args = Mesh.parse("dp=2"), (torch.randn(4, 64),)
    program = trace(Highest(), args, {}, mesh=mesh, loss=lambda y: (y**2).sum()).program
    found = run(program, "data-parallel,reshard")
    assert not [c for c in conversions(found) if isinstance(c[2], Shard)]
    sent = [(t.axis, t.collective, t.calls, t.bytes) for t in price(found, load("h100")).traffic if t.when == "forward"]
    assert sent == [("dp", "all_reduce", 2, 2 * 64 * 4)]  # 2b(N-1)/N each: maxima, and how many are equal


@pytest.mark.parametrize("rows", [4, 5])
def test_the_largest_of_all_rows_is_exact(rows):
    x = torch.randn(rows, 64).round()
    report = autopar.verify(Highest(), "dp=2", args=(x,), loss=lambda y: (y**3).sum())
    assert report.ok, str(report)


class Reversed(nn.Module):
    """Rows in another order: computed whole, and each rank still returns its own rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0) * 2


def test_an_output_with_rows_is_this_rank_s_rows():
    program = trace(Reversed(), (torch.randn(2, 4),), {}, mesh=Mesh.parse("dp=2"), loss=lambda y: (y**2).sum()).program
    found = run(program, "data-parallel,reshard")
    index = next(i for i, o in enumerate(found.outputs) if o.kind == "user")
    assert str(found.graph.output_node().args[0][index].meta["layout"]["dp"]) == "S(0)"


class Second(nn.Module):
    """Rows on dim 1."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sum(0) ** 2).sum()


def test_a_batch_dim_that_is_not_the_first():
    program = trace(Second(), (torch.randn(6, 4),), {}, mesh=Mesh.parse("dp=2"), batch_dims=[1]).program
    found = run(program, "data-parallel,reshard")
    x = next(n for n in found.graph.nodes if "input" in n.meta)
    assert x.meta["layout"]["dp"] == Shard(1, (Piece(8, 2, 4),))
