"""Conversions of values that several axes shard, lowered for every rank and run on simulated ranks."""

from itertools import permutations, product

import pytest
import torch
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import I, Layout, P, Piece, R, Shard, Type, overlap, piece, plain_shard, zigzag_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Spec
from autopar.rules.local import ROWS, convert
from autopar.rules.place import Place, run_start
from autopar.rules.strategies import strategies
from autopar.rules.table import aten
from autopar.runtime.axis import axes_of
from autopar.runtime.simulate import device_mesh, run_ranks
from tests.rules.execute import Op, localized
from tests.rules.shards import owned, terms

MESH = Mesh.of({"dp": 2, "tp": 2})
SHAPE = (12, 8)
OUTER = Shard(0, (Piece(12, 2, 6),))
UNEVEN = Shard(0, (Piece(12, 6, 2, (4, 2)),))
INNER = Shard(0, (Piece(12, 2, 1),))
MIDDLE = Shard(0, (Piece(12, 2, 3),))
FUSED = Shard(0, (piece(8, 8, 1, 2), piece(4, 4, 1, 2)))
FUSED_INNER = Shard(0, (Piece(8, 2, 1), Piece(4, 2, 1)))
COLUMN = Shard(1, (Piece(8, 2, 4),))
MIXED = Shard(1, (Piece(8, 2, 2),))
KINDS: list[Type] = [I, R, P, OUTER, UNEVEN, INNER, MIDDLE, FUSED, FUSED_INNER, COLUMN, MIXED]
DUAL: dict[Type, Type] = {I: I, R: P, P: R}


def shard_free(kind: Type, other: Type) -> bool:
    return not (isinstance(kind, Shard) and isinstance(other, Shard) and overlap(kind, other))


CASES = [
    (other, src, dst)
    for other in (I, OUTER, UNEVEN, INNER, COLUMN, FUSED)
    for src, dst in permutations(KINDS, 2)
    if shard_free(src, other) and shard_free(dst, other)
]


def held(x: Tensor, layout: Layout, part: dict[str, int], at: dict[str, int]) -> Tensor:
    """What the rank at ``at`` holds; where the layout is P on tp, its term."""
    if layout["tp"] == P:
        x = terms(x, 2, torch.Generator().manual_seed(1))[at["tp"]]
    for d, n in enumerate(SHAPE):
        x = x.index_select(d, torch.tensor(owned(layout, d, n, MESH, at)))
    return x


def dual(layout: Layout) -> Layout:
    kind = layout["tp"]
    return layout if isinstance(kind, Shard) else layout.having("tp", DUAL[kind])


def summed(parts: list[Tensor], layout: Layout) -> list[Tensor]:
    """Terms on tp replaced by their sum, the rest as it is."""
    if layout["tp"] != P:
        return parts
    return [parts[2 * (r // 2)] + parts[2 * (r // 2) + 1] for r in range(4)]


@pytest.mark.parametrize("other", (I, OUTER, UNEVEN, INNER, COLUMN, FUSED), ids=str)
def test_every_conversion_beside_every_shard(other: Type) -> None:
    g = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(SHAPE, generator=g, dtype=torch.float64) for _ in range(2))
    cases = [(src, dst) for o, src, dst in CASES if o == other and not (src == P and dst == P)]
    before = [Layout.of({"dp": other, "tp": src}) for src, _ in cases]
    after = [Layout.of({"dp": other, "tp": dst}) for _, dst in cases]

    def rank(r: int) -> list[tuple[Tensor, Tensor]]:
        at, axes, found = MESH.coordinates(r), axes_of(MESH, device_mesh(MESH)), []
        for have, want in zip(before, after):
            graph = fx.Graph()
            value, handle = graph.placeholder("x"), graph.placeholder("tp")
            node = graph.call_function(ops.convert, (value, "tp", have["tp"], want["tp"]))
            node.meta["spec"] = Spec(SHAPE, x.dtype)
            convert(node, Place(MESH, at, (have,), (want,), lambda name, h=handle: h))
            local = held(x, have, {}, at).requires_grad_()
            args = fx.map_arg(node.args, lambda n, v=value, i=local: i if n is v else axes["tp"])
            with torch.enable_grad():
                out = node.target(*args)
                out.backward(held(grad, dual(want), {}, at))
            found.append((out.detach(), local.grad))
        return found

    ranks = run_ranks(4, rank)
    for i, (have, want) in enumerate(zip(before, after)):
        outs, grads = (summed([r[i][k] for r in ranks], lay) for k, lay in ((0, want), (1, dual(have))))
        for r, at in enumerate(MESH):
            whole_out = Layout.of({"dp": other, "tp": I if want["tp"] == P else want["tp"]})
            whole_grad = Layout.of({"dp": other, "tp": I if dual(have)["tp"] == P else dual(have)["tp"]})
            torch.testing.assert_close(outs[r], held(x, whole_out, {}, at), msg=lambda m, i=i: f"{cases[i]}: {m}")
            torch.testing.assert_close(grads[r], held(grad, whole_grad, {}, at), msg=lambda m, i=i: f"{cases[i]}: {m}")


def test_every_row_occurs() -> None:
    rows = {type(s).__name__[0] + type(d).__name__[0] for _, s, d in CASES}
    assert rows - {"SS"} == set(ROWS)


@pytest.mark.parametrize(
    "layout", [{"dp": o, "tp": t} for o, t in product((I, OUTER, UNEVEN, COLUMN), KINDS) if shard_free(t, o)]
)
def test_a_run_starts_at_its_first_element_or_is_refused(layout: dict[str, Type]) -> None:
    found = Layout.of(layout)
    for at in MESH:
        mine = owned(found, 0, 12, MESH, at)
        if mine == list(range(mine[0], mine[-1] + 1)):
            if len([p for _, s in found.shards(0) for p in s.pieces]) <= 1:
                assert run_start(found, 0, 12, MESH, at) == mine[0]
        else:
            with pytest.raises(AutoparError) as caught:
                run_start(found, 0, 12, MESH, at)
            assert caught.value.slug == "scattered-run"


@pytest.mark.parametrize(
    ("target", "place"), [(aten.embedding.default, 2), (ops.token_loss, 4)], ids=("embedding", "loss")
)
def test_the_vocabulary_is_that_of_the_rank_s_share(target: object, place: int) -> None:
    args = (torch.randn(12, 6), torch.arange(6)) if place == 2 else (torch.randn(5, 12), torch.arange(5), 0)
    op = Op.of(target, args, {})
    for kind, runs in (
        (plain_shard(place // 4, 12, 3), [((0, 4),), ((4, 4),), ((8, 4),)]),
        (Shard(place // 4, (Piece(12, 12, 1, (7, 1, 4)),)), [((0, 7),), ((7, 1),), ((8, 4),)]),
        (zigzag_shard(place // 4, 12, 3), [((0, 2), (10, 2)), ((2, 2), (8, 2)), ((4, 4),)]),
    ):
        (a,) = {x for x in strategies(op.node, [[kind] if kind else [], [], []]) if kind in x.inputs}
        assert [localized(op, a, 3, c).args[place] for c in range(3)] == runs
