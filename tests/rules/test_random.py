"""Dropout and noise on shards: the same where ranks hold the same value, different where they hold different parts."""

import pytest
import torch
from torch import Tensor

from autopar.ir import ops
from autopar.ir.layout import I, R, Shard, Type, plain_shard
from autopar.rules.relation import Assignment
from autopar.rules.strategies import strategies
from autopar.runtime.axis import Axis
from autopar.runtime.random import Rng
from tests.rules.execute import Op, localized
from tests.rules.shards import cut
from tests.rules.test_table import TABLE

WAYS, P_DROP = 4, 0.25
RANDOM = (ops.dropout,)


def masks(op: Op, a: Assignment, seed: int = 0) -> list[Tensor]:
    """Where each coordinate keeps an element; kept ones must be scaled by 1 / (1 - p), gradients alike."""
    parts = cut(op.tensors[0], a.inputs[0], WAYS, torch.Generator())
    found = []
    for c, x in enumerate(parts):
        node = localized(op, a, WAYS, c)
        x = x.clone().requires_grad_()
        handles = [Axis(h.name, WAYS, c, "") for h in node.args[3]]
        out = node.target(x, *node.args[1:3], tuple(handles), Rng(torch.tensor(seed)))
        out.sum().backward()
        kept = out != 0
        torch.testing.assert_close(out, torch.where(kept, x / (1 - P_DROP), 0.0))
        torch.testing.assert_close(x.grad, kept.double() / (1 - P_DROP))
        found.append(kept)
    return found


@pytest.mark.parametrize("kind", [I, R, plain_shard(0, 256, WAYS), plain_shard(1, 64, WAYS)], ids=str)
def test_masks_follow_the_types(kind: Type) -> None:
    assert RANDOM[0] in TABLE
    op = Op.of(ops.dropout, (torch.ones(256, 64, dtype=torch.float64), P_DROP, 3), {})
    a = Assignment((kind,), (kind,))
    assert a in strategies(op.node, [[kind] if isinstance(kind, Shard) else [], []])
    found = masks(op, a)
    share = torch.stack(found).double().mean().item()
    assert abs(share - (1 - P_DROP)) < 0.02
    pairs = [(x, y) for i, x in enumerate(found) for y in found[i + 1 :]]
    assert all(torch.equal(x, y) != isinstance(kind, Shard) for x, y in pairs)
    assert all(torch.equal(x, y) for x, y in zip(found, masks(op, a)))
    assert not torch.equal(found[0], masks(op, a, seed=1)[0])


@pytest.mark.parametrize("kind", [I, R, plain_shard(0, 8, WAYS), plain_shard(1, 64, WAYS)], ids=str)
@pytest.mark.parametrize("numbers", ["uniform", "normal"])
def test_noise_follows_the_types(kind: Type, numbers: str) -> None:
    op = Op.of(ops.draw, (torch.zeros(8, 64, dtype=torch.float64), numbers, 3), {})
    a = Assignment((kind,), (kind,))
    assert ops.draw in TABLE and a in strategies(op.node, [[kind] if isinstance(kind, Shard) else [], []])

    def drawn(seed: int) -> list[Tensor]:
        nodes = [localized(op, a, WAYS, c) for c in range(WAYS)]
        parts = cut(op.tensors[0], kind, WAYS, torch.Generator())
        shares = [tuple(Axis(h.name, WAYS, c, "") for h in n.args[3]) for c, n in enumerate(nodes)]
        rng = Rng(torch.tensor(seed))
        return [n.target(x, *n.args[1:3], s, rng) for n, x, s in zip(nodes, parts, shares, strict=True)]

    found = drawn(0)
    pairs = [(x, y) for i, x in enumerate(found) for y in found[i + 1 :]]
    assert all(torch.equal(x, y) != isinstance(kind, Shard) for x, y in pairs)
    assert all(torch.equal(x, y) for x, y in zip(found, drawn(0)))
    assert not torch.equal(found[0], drawn(1)[0])
    assert not any("P" in map(str, s.inputs) for s in strategies(op.node, [[], []]))


def test_a_partial_value_is_not_dropped() -> None:
    """A sum of terms with different masks is not the masked sum."""
    op = Op.of(ops.dropout, (torch.ones(4, 4, dtype=torch.float64), P_DROP, 3), {})
    assert all(str(t) != "P" for a in strategies(op.node, [[], []]) for t in a.inputs)


@pytest.mark.parametrize("kind", [plain_shard(0, 4, 2), plain_shard(1, 4, 2), R], ids=str)
def test_attention_s_dropout_takes_the_axes_that_share_its_heads(kind: Type) -> None:
    q = torch.randn(4, 4, 6, 2, dtype=torch.float64)
    op = Op.of(ops.attention, (q, q, q, None, 0.5), {"key": 7})
    node = localized(op, Assignment((kind,) * 3, (kind,)), 2, 1)
    assert node.args[8] == 7
    assert [h.name for h in node.args[9]] == (["tp"] if isinstance(kind, Shard) else [])
