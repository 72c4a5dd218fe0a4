"""Relations against enumeration: a shard of one side and of the other must hold the same elements."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.layout import P, Piece, R, Shard, piece
from autopar.rules.relation import Labels, Opaque, Reshape, Segments, join
from tests.rules.shards import holds, shards

FAST = settings(max_examples=300, deadline=None, derandomize=True)


def elements(shape: tuple[int, ...], shard: Shard, coordinate: int, ways: int) -> list[int]:
    """Flat indices that the coordinate holds, in its local order."""
    index = torch.arange(prod(shape)).reshape(shape)
    return index.index_select(shard.dim, torch.tensor(holds(shard, coordinate, ways))).flatten().tolist()


@st.composite
def any_shard(draw: st.DrawFn, shape: tuple[int, ...], ways: int) -> Shard:
    dims = [d for d, n in enumerate(shape) if n >= ways]
    assume(dims)
    d = draw(st.sampled_from(dims))
    found = list(shards(d, shape[d], ways))
    for inner in (k for k in range(1, shape[d]) if shape[d] % (k * ways) == 0):
        found.append(Shard(d, (Piece(shape[d], ways, inner),)))
    assume(found)
    return draw(st.sampled_from(found))


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Shard, int]:
    """Two shapes of one number of elements, made of one list of factors, and a shard of the first."""
    factors = draw(st.lists(st.sampled_from((1, 2, 2, 3, 4)), min_size=1, max_size=5))

    def shape() -> tuple[int, ...]:
        out, left = [], list(factors)
        while left:
            n = draw(st.integers(1, len(left)))
            out.append(prod(left[:n]))
            left = left[n:]
        return tuple(out)

    source, target = shape(), shape()
    if draw(st.booleans()):
        factors = draw(st.permutations(factors))
        target = shape()
    ways = draw(st.sampled_from((2, 3, 4)))
    return source, target, draw(any_shard(source, ways)), ways


@FAST
@given(views())
def test_a_view_moves_no_element(case):
    source, target, shard, ways = case
    a = Reshape(source, target).transfer(0, shard)
    if a is None:
        return
    assert a.inputs == (shard,)
    for c in range(ways):
        assert elements(source, shard, c, ways) == elements(target, a.outputs[0], c, ways)


@FAST
@given(views())
def test_a_view_reads_the_same_backwards(case):
    source, target, shard, ways = case
    a = Reshape(target, source).transfer(1, shard)
    b = Reshape(source, target).transfer(0, shard)
    assert (a is None) == (b is None)
    assert a is None or b is None or (a.inputs, a.outputs) == (b.outputs, b.inputs)


@FAST
@given(views())
def test_a_view_that_is_refused_is_held_by_no_one_shard(case):
    """No single shard of the target holds the same elements, or the rule would have lost one."""
    source, target, shard, ways = case
    if len(shard.pieces) > 1 or Reshape(source, target).transfer(0, shard) is not None:
        return
    want = [elements(source, shard, c, ways) for c in range(ways)]
    for d, n in enumerate(target):
        for inner in (k for k in range(1, n + 1) if n % k == 0):
            for count in (k for k in range(2, n // inner + 1) if n % (k * inner) == 0):
                p = shard.pieces[0]
                if p.sizes is None and count != ways or p.sizes is not None and count != p.count:
                    continue
                other = Shard(d, (Piece(n, count, inner, p.sizes),))
                have = [elements(target, other, c, ways) for c in range(ways)]
                assert have != want, (source, target, shard, other)


def test_views_that_matter():
    def view(source, target, shard):
        a = Reshape(source, target).transfer(0, shard)
        return a and a.outputs[0]

    rows = Shard(0, (Piece(4, 2, 2),))
    assert view((4, 6, 8), (24, 8), rows) == Shard(0, (Piece(24, 2, 12),))
    tokens = Shard(1, (Piece(6, 2, 3),))
    assert view((4, 6, 8), (24, 8), tokens) == Shard(0, (Piece(24, 2, 3),))
    assert view((24, 8), (4, 6, 8), Shard(0, (Piece(24, 2, 3),))) == tokens
    assert view((4, 6, 64), (4, 6, 8, 8), Shard(2, (Piece(64, 2, 32),))) == Shard(2, (Piece(8, 2, 4),))
    assert view((4, 6, 64), (4, 6, 8, 8), Shard(2, (Piece(64, 2, 4),))) == Shard(3, (Piece(8, 2, 4),))
    assert view((4, 9), (6, 6), Shard(1, (Piece(9, 3, 3),))) is None
    assert view((3, 8), (24,), Shard(1, (Piece(8, 2, 2),))) == Shard(0, (Piece(24, 2, 2),))
    fused = Shard(0, (Piece(8, 2, 4), Piece(4, 2, 2)))
    assert view((12, 5), (1, 12, 5), fused) == Shard(1, fused.pieces)
    assert view((3, 12), (36,), Shard(1, fused.pieces)) is None
    assert Reshape((4,), (5,)).transfer(0, Shard(0, (Piece(4, 2, 2),))) is None


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Shard, int]:
    ways = draw(st.sampled_from((2, 3, 4)))
    lengths = tuple(ways * n for n in draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    if draw(st.booleans()):
        lengths = tuple(max(1, n + draw(st.integers(-1, 1))) for n in lengths)
    port = draw(st.integers(0, len(lengths)))
    size = sum(lengths) if port == 0 else lengths[port - 1]
    found = list(shards(0, size, ways))
    if port == 0 and all(n % ways == 0 for n in lengths):
        found.append(Shard(0, join([piece(n, n, 1, ways) for n in lengths])))
    assume(found)
    return lengths, port, draw(st.sampled_from(found)), ways


@FAST
@given(cuts())
def test_split_and_cat_keep_each_element_with_its_owner(case):
    lengths, port, shard, ways = case
    split = Segments(lengths, 0, True, 1).transfer(port, shard)
    at = port - 1 if port else len(lengths)
    cat = Segments(lengths, 0, False, 1).transfer(at, shard)
    assert (split is None) == (cat is None)
    if split is None or cat is None:
        return
    assert (split.inputs, split.outputs) == (cat.outputs, cat.inputs)
    assert (*split.inputs, *split.outputs)[port] == Shard(0, join(shard.pieces))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for c in range(ways):
        parts = [[s + e for e in holds(t, c, ways)] for s, t in zip(starts, split.outputs)]
        assert holds(split.inputs[0], c, ways) == list(itertools.chain(*parts))


def test_a_part_of_a_fused_weight_brings_its_neighbours_along():
    """Query heads over the axis: the fused dim is three segments, keys and values in proportion."""
    a = Segments((64, 16, 16), 2, True, 3).transfer(1, Shard(2, (Piece(64, 2, 32),)))
    assert a is not None
    assert (
        a.inputs
        == (Shard(2, (Piece(64, 2, 32), Piece(32, 2, 8))),)
        == (Shard(2, join([Piece(64, 2, 32), Piece(16, 2, 8), Piece(16, 2, 8)])),)
    )
    assert a.outputs[1] == a.outputs[2] == Shard(2, (Piece(16, 2, 8),))


def test_split_of_a_run_that_crosses_a_boundary_is_refused():
    assert Segments((6, 6), 0, True, 1).transfer(0, Shard(0, (Piece(12, 2, 6),))) is None
    assert Segments((4, 5), 0, True, 1).transfer(1, Shard(0, (Piece(4, 2, 2),))) is None


def test_labels():
    linear = Labels(
        (("b", "i"), ("o", "i"), ("o",)),
        (("b", "o"),),
        added=frozenset({2}),
        linear=(frozenset({0, 2}), frozenset({0})),
    )
    s = Shard(1, (Piece(4, 2, 2),))
    contracted = linear.transfer(0, s)
    assert contracted is not None and contracted.inputs == (s, s, P) and contracted.outputs == (P,)
    column = linear.transfer(2, Shard(0, (Piece(4, 2, 2),)))
    assert (
        column is not None and column.inputs == (R, Shard(0, s.pieces), Shard(0, s.pieces)) and column.outputs == (s,)
    )
    assert [(p.inputs, p.outputs) for p in linear.partials()] == [((P, R, P), (P,))]
    assert Labels((("b", "b"),), (("b",),)).transfer(0, s) is None
    assert Labels(((None, "b"),), (("b",),)).transfer(0, Shard(0, (Piece(1, 2, 1),))) is None


def test_an_op_without_a_rule_is_computed_whole():
    assert Opaque().transfer(0, Shard(0, (Piece(4, 2, 2),))) is None
    assert list(Opaque().partials()) == []


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        ([Piece(4, 2, 2), Piece(4, 2, 2)], (Piece(8, 2, 2),)),
        ([Piece(4, 2, 2), Piece(8, 2, 4)], (Piece(4, 2, 2), Piece(8, 2, 4))),
        ([Piece(3, 3, 1, (2, 1)), Piece(3, 3, 1, (2, 1))], (Piece(6, 3, 1, (2, 1)),)),
    ],
)
def test_join(pieces, joined):
    assert join(pieces) == joined
