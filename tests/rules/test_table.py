"""Every line of the rule table, executed on shards, forward and backward, against the op on whole tensors."""

from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch

from autopar.ir import ops
from autopar.ir.layout import I, P, Piece, Shard, plain_shard
from autopar.ir.layout import R as RR
from autopar.rules.attention import Attention
from autopar.rules.relation import Assignment, Grouped
from autopar.rules.strategies import legal
from autopar.rules.table import SPREAD, TABLE, aten, relation
from autopar.runtime.shards import gathered
from tests.rules.execute import Op, check
from tests.rules.samples import MAKE, Random, calls

S1 = plain_shard(1, 6, 2)
RANDOM = {ops.dropout, ops.draw}  # their own tests compare masks and numbers
LINES = [t for t in TABLE if t not in RANDOM]


WHOLE = {  # ops that leave nothing to share out
    aten.max.default, aten.min.default, aten.any.default, aten.all.default, aten.prod.default, aten.arange.default,
    aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default,
}  # fmt: skip


def test_every_line_has_samples() -> None:
    assert set(MAKE) == set(LINES)


def name_of(target: Any) -> str:
    """The same in every process: no address."""
    return target.__name__ if isinstance(target, FunctionType) else str(target)


@pytest.mark.parametrize("ways", (2, 3, 4))
@pytest.mark.parametrize("target", LINES, ids=name_of)
def test_line(target, ways):
    found: set[Any] = set()
    for args, kwargs in calls(target):
        op = Op.of(target, args, kwargs)
        for a in op.assignments(ways):
            found |= {type(t) for t in (*a.inputs, *a.outputs)}
            try:
                check(op, a, ways)
            except Exception as error:
                error.add_note(f"{op.node.format_node()} {[tuple(t.shape) for t in op.tensors]}: {a}")
                raise
    assert Shard in found or target in WHOLE


R = Random(0)
Q, K, V = R(2, 4, 4, 2), R(2, 4, 4, 2), R(2, 4, 4, 2)
BLOCKED = [  # op, its call, and the port and dim that must not be sharded
    (aten._softmax.default, (R(4, 6), 1, False), 0, 1),
    (aten._log_softmax.default, (R(4, 6), 1, False), 0, 1),
    (aten.cumsum.default, (R(4, 6), 1), 0, 1),
    (aten.sort.default, (R(4, 6), 1), 0, 1),
    (aten.prod.dim_int, (R(4, 6), 1, True), 0, 1),
    (aten.layer_norm.default, (R(4, 6), [6], R(6), R(6)), 0, 1),
    (aten.rms_norm.default, (R(4, 6), [6], R(6)), 0, 1),
    (aten.triu.default, (R(4, 4),), 0, 0),
    (aten.flip.default, (R(4, 6), [1]), 0, 1),
    (aten.roll.default, (R(4, 6), [1], [1]), 0, 1),
    (aten.convolution.default, (R(2, 4, 6), R(4, 4, 3), None, [1], [1], [1], False, [0], 1), 0, 2),
    (aten.convolution.default, (R(2, 4, 6), R(4, 2, 2), None, [1], [0], [1], False, [0], 2), 1, 1),
    (aten.convolution.default, (R(2, 4, 6), R(4, 4, 1), None, [2], [0], [1], False, [0], 1), 0, 2),
    (aten.convolution.default, (R(2, 4, 6), R(4, 4, 1), None, [1], [1], [1], False, [0], 1), 0, 2),
    (aten.convolution.default, (R(2, 4, 3), R(4, 4, 1), None, [2], [1], [1], True, [0], 1), 0, 2),
    (aten.embedding.default, (R(6, 4), torch.tensor([1, 1, 1, 2]), -1, True), 1, 0),
    (aten.scatter.src, (R(4, 6), 1, R.ints(6, 4, 6), R(4, 6)), 0, 1),
    (aten.constant_pad_nd.default, (R(4, 6), [-1, 1]), 0, 1),
    (ops.attention, (Q, K, V), 1, 2),
    (ops.attention, (Q, K, V, None, 0.0, True), 0, 2),
]


@pytest.mark.parametrize(
    ("target", "args", "port", "dim"), BLOCKED, ids=[f"{n}-{name_of(b[0])}" for n, b in enumerate(BLOCKED)]
)
def test_a_blocked_dim_would_be_wrong_and_is_refused(target, args, port, dim):
    """Without the block the same shards give another value, so that the check above can fail."""
    op, rel = Op.of(target, args, {}), relation(Op.of(target, args, {}).node)
    shapes = [t.shape for t in op.tensors]
    shard = plain_shard(dim, shapes[port][dim], 2)
    open_ = (
        replace(rel, labels=replace(rel.labels, blocked=frozenset()))
        if isinstance(rel, (Attention, Grouped))
        else replace(rel, blocked=frozenset())
    )
    a = open_.transfer(port, shard)
    assert a is not None and rel.transfer(port, shard) is None
    assert not legal(op.node, a.inputs, a.outputs)
    with pytest.raises((AssertionError, RuntimeError)):
        check(op, a, 2)


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_that_no_rank_has_is_refused_by_all(index):
    for runs in ([(0, 3)], [(3, 3)]):
        with pytest.raises(RuntimeError, match="out of bounds"):
            gathered(R(4, 3), 1, torch.full((4, 1), index), tuple(runs), 6)


@pytest.mark.parametrize("target", sorted(SPREAD, key=name_of), ids=name_of)
@pytest.mark.parametrize("sizes", [(0, 12), (5, 7, 0), (3, 0, 0, 9)])
def test_ranks_may_hold_nothing_of_a_dim_that_is_reduced(target, sizes):
    shard = Shard(0, (Piece(12, 12, 1, sizes),))
    for args, kwargs in (((R(12, 4), 0), {}), ((R.ints(3, 12, 4).double(), 0), {})):
        op = Op.of(target, args, kwargs)
        a = relation(op.node).transfer(0, shard)
        assert a is not None and a.inputs == (shard,)
        check(op, a, len(sizes))


def test_a_shard_that_cuts_a_group_of_channels_is_refused():
    op = Op.of(aten.convolution.default, (R(2, 6, 5), R(6, 2, 2), None, [1], [0], [1], False, [0], 3), {})
    assert relation(op.node).transfer(0, plain_shard(1, 6, 3)) is not None
    assert relation(op.node).transfer(0, plain_shard(1, 6, 2)) is None


S0 = plain_shard(0, 4, 2)
S2 = plain_shard(2, 6, 2)
HEADS = plain_shard(1, 4, 2)


@pytest.mark.parametrize(
    ("target", "args", "inputs", "outputs"),
    [
        (aten.linear.default, (R(4, 6), R(4, 6), R(4)), (S0, RR, RR), (S0,)),
        (aten.linear.default, (R(4, 6), R(4, 6), R(4)), (RR, S0, S0), (plain_shard(1, 4, 2),)),
        (aten.linear.default, (R(4, 6), R(4, 6), R(4)), (S1, S1, P), (P,)),
        (aten.linear.default, (R(4, 6), R(4, 6), R(4)), (P, RR, P), (P,)),
        (aten.addmm.default, (R(4), R(4, 6), R(6, 4)), (P, S1, plain_shard(0, 6, 2)), (P,)),
        (aten.embedding.default, (R(4, 6), R.ints(4, 3)), (S0, I), (P,)),
        (aten.embedding.default, (R(4, 6), R.ints(4, 3)), (S1, I), (S1,)),
        (aten.embedding.default, (R(4, 6), R.ints(4, 4)), (RR, S0), (S0,)),
        (ops.token_loss, (R(4, 6), R.ints(6, 4), -1), (S1, I), (I,)),
        (ops.token_loss, (R(4, 6), R.ints(6, 4), -1), (S0, S0), (S0,)),
        (ops.attention, (Q, K, V), (HEADS,) * 3, (HEADS,)),
        (ops.attention, (Q, K, V), (plain_shard(2, 4, 2), RR, RR), (plain_shard(2, 4, 2),)),
        (aten.conv1d.default, (R(4, 4, 6), R(4, 4, 1), R(4)), (S2, RR, RR), (S2,)),
        (aten.mean.dim, (R(4, 6), [1]), (S1,), (P,)),
        (aten.mean.dim, (R(4, 6), [1]), (S0,), (S0,)),
        (aten.sum.default, (R(4, 6),), (S1,), (P,)),
        (aten.softmax.int, (R(4, 6), 1), (S0,), (S0,)),
        (aten.softmax.int, (R(4, 6), 1), (S1,), (S1,)),
        (aten.log_softmax.int, (R(4, 6), -1), (S1,), (S1,)),
        (aten.logsumexp.default, (R(4, 6), [1]), (S1,), (I,)),
        (aten.amax.default, (R(4, 6), [1]), (S1,), (I,)),
        (aten.max.dim, (R(4, 6), 1), (S1,), (I, I)),
        (aten.layer_norm.default, (R(4, 6), [6], R(6), R(6)), (S0, RR, RR), (S0,)),
        (aten.add.Tensor, (R(4, 6), R(4, 6)), (P, P), (P,)),
        (aten.add.Tensor, (R(4, 6), R(6)), (S1, plain_shard(0, 6, 2)), (S1,)),
        (aten.where.self, (R.bools(4, 6), R(4, 6), R(4, 6)), (I, P, P), (P,)),
        (aten.view.default, (R(4, 6), [24]), (S0,), (plain_shard(0, 24, 2),)),
        (aten.index.Tensor, (R(4, 6), [R.ints(4, 4)]), (RR, S0), (S0,)),
        (aten.gather.default, (R(4, 6), 1, R.ints(6, 4, 2)), (S0, S0), (S0,)),
        (aten.expand.default, (R(4, 1), [4, 6]), (RR,), (S1,)),
        (aten.full.default, ([4, 6], 1.0), (), (S1,)),
    ],
)  # fmt: skip
def test_strategies_that_must_be_there(target, args, inputs, outputs):
    assert legal(Op.of(target, args, {}).node, inputs, outputs)


@pytest.mark.parametrize(
    ("target", "args", "inputs", "outputs"),
    [
        (aten.relu.default, (R(4, 6),), (P,), (P,)),
        (aten.mul.Tensor, (R(4, 6), R(4, 6)), (P, P), (P,)),
        (aten.add.Tensor, (R(4, 6), R(4, 6)), (P, RR), (P,)),
        (aten.add.Tensor, (R(4, 6), 1.0), (P,), (P,)),
        (aten.div.Tensor, (R(4, 6), R(4, 6)), (RR, P), (P,)),
        (aten.linear.default, (R(4, 6), R(2, 6), R(2)), (P, RR, RR), (P,)),
        (aten.linear.default, (R(4, 6), R(2, 6), R(2)), (S1, S1, RR), (P,)),
        (aten.linear.default, (R(4, 6), R(2, 6)), (S1, S1), (RR,)),
        (aten.linear.default, (R(4, 6), R(2, 6)), (S1, RR), (P,)),
        (aten.linear.default, (R(4, 6), R(2, 6)), (plain_shard(0, 4, 2), I), (plain_shard(0, 4, 2),)),
        (ops.token_loss, (R(4, 6), R.ints(6, 4), 0), (RR, I), (I,)),
        (aten.amax.default, (R(4, 6), [1]), (S1,), (RR,)),
        (aten.logsumexp.default, (R(4, 6), [1]), (S1,), (P,)),
        (aten.softmax.int, (R(4, 6), 1), (P,), (P,)),
        (ops.attention, (Q, K, V), (P, RR, RR), (P,)),
    ],
)
def test_wrong_types_are_refused(target, args, inputs, outputs):
    op = Op.of(target, args, {})
    assert not legal(op.node, inputs, outputs)
    try:
        check(op, Assignment(inputs, outputs), 2)
    except (AssertionError, RuntimeError):
        return
    raise AssertionError("the types are right")
