"""Attention with the sequence sharded over a mesh axis: keys and values go around a ring, queries stay.

Liu et al. 2023 (arXiv:2310.01889). The next block of keys and values travels while the current one is computed. With
N ranks and b bytes of all keys (values as many), the forward sends 2b(N-1)/N bytes a rank, the backward as many for
keys and values again and 2b(N-1)/N, in the dtype of accumulation, for their gradients.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.runtime._functional import arrived, departed
from autopar.runtime.axis import Axis
from autopar.runtime.tiles import (
    TILE,
    Band,
    Run,
    Saved,
    Scores,
    State,
    backward_tile,
    forward_tile,
    fused,
    tiles,
    wide_of,
)  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Where a rank's queries and every coordinate's keys lie in the whole sequences, as runs in local order."""

    queries: tuple[Run, ...]
    keys: tuple[tuple[Run, ...], ...]

    def length(self, coordinate: int) -> int:
        """Keys that the coordinate holds."""
        return sum(n for _, n in self.keys[coordinate])


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    fill: float | None,
    queries: tuple[Run, ...],
    keys: tuple[tuple[Run, ...], ...],
    axis: Axis | None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    cap: float | None = None,
    band: tuple[int | None, int | None] | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
) -> Tensor:
    """softmax(scores) v where queries, keys and values are S on ``axis`` along the sequence.

    Args:
        q: [..., H, s, D]. k: [..., G, t, D]. v: [..., G, t, E]: this rank's positions; G divides H, and a group of
            H/G query heads reads one key head, which is never repeated.
        mask: bool (True: seen) or float (added), broadcastable to [..., H, s, T]: this rank's rows, every key.
        is_causal: a query sees keys up to its own global position.
        scale: 1/sqrt(D) where None.
        fill: the score of what a bool mask hides; minus infinity where None.
        queries: this rank's runs of global positions, in local order.
        keys: those of every coordinate's keys.
        axis: None where this rank holds the whole sequence, which is then computed tile by tile.
        bias: like a float mask, beside a bool one. sink, cap, band: as in ``autopar.ir.ops.attention``.
        query_ids, key_ids: [B or 1, s] of this rank's rows and [B or 1, T] of every key; B is the only dim before H.

    Returns:
        [..., H, s, E] in q's dtype, S on ``axis``; accumulated in float32 at least. A query that sees nothing gets 0.
        Where PyTorch's own kernel would add a float mask on this device, gradients are its: of a row whose every score
        is the dtype's lowest, as large as if each key had all of the probability.
    """
    by_sum = _kernel_adds(q, v, mask, fill, cap)
    if mask is not None and mask.dtype != torch.bool:
        bias = mask if bias is None else mask + bias
        mask = None
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    shape = (*lead, *q.shape[-3:-1], v.shape[-1])
    mask, bias, sink = (None if x is None else _four(x, lead) for x in (mask, bias, sink))
    q, k, v = (x.expand((*lead, *x.shape[-3:])).reshape((-1, *_heads(x))) for x in (q, k, v))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    low, high = band or (None, None)
    rule = Scores(scale, Band(max(0, low or 0) if is_causal else low, high), fill=fill, cap=cap, by_sum=by_sum)
    ids = None if query_ids is None or key_ids is None else (query_ids, key_ids)
    out: Tensor = _Ring.apply(q, k, v, bias, sink, mask, ids, rule, Places(queries, keys), axis)
    return out.reshape(shape)


def whole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    fill: float | None,
    bias: Tensor | None,
    sink: Tensor | None,
    cap: float | None,
    band: tuple[int | None, int | None] | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
) -> Tensor:
    """``ring_attention`` of whole sequences: tile by tile, without the tiles that the masks empty."""
    queries, keys = ((0, q.shape[-2]),), (((0, k.shape[-2]),),)
    more = (bias, sink, cap, band, query_ids, key_ids)
    return ring_attention(q, k, v, mask, is_causal, scale, fill, queries, keys, None, *more)


def _kernel_adds(q: Tensor, v: Tensor, mask: Tensor | None, fill: float | None, cap: float | None) -> bool:
    """Whether scaled_dot_product_attention would give such a mask to a fused kernel, whose gradients use the sum."""
    added = mask is not None and mask.dtype != torch.bool and not mask.requires_grad
    return added and fill is None and cap is None and q.dim() == 4 and fused(q, v)


def _heads(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[-3:]) if x.dim() > 2 else (1, *x.shape)


def _four(mask: Tensor, lead: torch.Size) -> Tensor:
    """The mask as [B or 1, H or 1, S or 1, T]."""
    mask = mask.reshape((1,) * max(0, 4 - mask.dim()) + tuple(mask.shape))
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape((1, *mask.shape[-3:]))
    return mask.expand((*lead, *mask.shape[-3:])).reshape((-1, *mask.shape[-3:]))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        mask: Tensor | None,
        ids: tuple[Tensor, Tensor] | None,
        rule: Scores,
        places: Places,
        axis: Axis | None,
    ) -> Tensor:
        wide = wide_of(q.dtype)
        scores = replace(rule, mask=mask, bias=bias, ids=ids)
        state, mine = State.empty(q, v.shape[-1], wide), q.to(wide)
        if sink is not None:
            state.begin(sink)
        block, steps = _Block.of(k, v), 1 if axis is None else axis.size
        for step in range(steps):
            owner = 0 if axis is None else (axis.coordinate - step) % axis.size
            moving = block.depart(places, owner, axis) if axis is not None and step < steps - 1 else None
            bk, bv = block.k.to(wide), block.v.to(wide)
            for tile in tiles(places.queries, places.keys[owner], rule.band, _limit(mine, bv, scores)):
                forward_tile(state, mine, bk, bv, tile, scores)
            if moving is not None:
                block = moving.arrive()
        out = state.result()
        ctx.save_for_backward(q, k, v, bias, sink, mask, *(ids or (None, None)), out, state.top, state.total)
        ctx.rule, ctx.places, ctx.axis = rule, places, axis
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, bias, sink, mask, *ids, out, top, total = ctx.saved_tensors
        wide = out.dtype
        saved = Saved(q.to(wide), out, grad.to(wide), top, total)
        scores = replace(ctx.rule, mask=mask, bias=bias, ids=None if ids[0] is None else tuple(ids))
        bias_grad = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[3] else None
        dq, dk, dv = _backward(saved, _Block.of(k, v), scores, ctx.places, ctx.axis, bias_grad)
        added = None if bias is None or bias_grad is None else bias_grad.to(bias.dtype)
        beside = saved.of_sink(sink) if ctx.needs_input_grad[4] else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), added, beside, None, None, None, None, None


def _limit(q: Tensor, v: Tensor, scores: Scores) -> int | None:
    """Longest tile: none where a kernel computes it without its scores in memory, a mask's own entries aside."""
    return None if scores.by_kernel and fused(q, v) and not scores.dense() else TILE


def _backward(
    saved: Saved, block: "_Block", scores: Scores, places: Places, axis: Axis | None, bias_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: those of keys and values travel behind their blocks, and the own ones stay."""
    wide, dq = saved.q.dtype, torch.zeros_like(saved.q)
    limit = _limit(saved.q, block.v, scores)
    home: _Block | None = None
    behind: _Moving | None = None
    steps = 1 if axis is None else axis.size
    for step in range(steps):
        owner = 0 if axis is None else (axis.coordinate - step) % steps
        moving = block.depart(places, owner, axis) if axis is not None and step < steps - 1 else None
        bk, bv = block.k.to(wide), block.v.to(wide)
        made = _Block(torch.zeros_like(bk), torch.zeros_like(bv))
        for tile in tiles(places.queries, places.keys[owner], scores.band, limit):
            backward_tile(saved, bk, bv, tile, scores, (dq, made.k, made.v), bias_grad)
        if home is None or axis is None:
            home = made
        else:
            if behind is not None:
                made = made.plus(behind.arrive())
            behind = made.depart(places, owner, axis)
        if moving is not None:
            block = moving.arrive()
    assert home is not None
    home = home if behind is None else home.plus(behind.arrive())
    return dq, home.k, home.v


@dataclass
class _Block:
    """Keys and values of one coordinate (or their gradients)."""

    k: Tensor
    v: Tensor

    @staticmethod
    def of(k: Tensor, v: Tensor) -> "_Block":
        return _Block(k.detach(), v.detach())

    def plus(self, other: "_Block") -> "_Block":
        return _Block(self.k + other.k, self.v + other.v)

    def depart(self, places: Places, owner: int, axis: Axis) -> "_Moving":
        """Start sending the block of ``owner`` to the next rank, and receiving the previous rank's."""
        n, here = axis.size, axis.coordinate
        coming = places.length((owner - 1) % n)
        shapes = [(*x.shape[:2], coming, x.shape[3]) for x in (self.k, self.v)]
        flat = torch.cat([self.k.reshape(-1), self.v.reshape(-1)])
        send, receive = [0] * n, [0] * n
        send[(here + 1) % n] = flat.numel()
        receive[(here - 1) % n] = sum(math.prod(s) for s in shapes)
        return _Moving(flat, departed(flat, axis, receive, send), shapes)


@dataclass
class _Moving:
    """A block on its way. What is sent is kept until the block that comes for it is here."""

    sent: Tensor
    flat: Tensor
    shapes: list[tuple[int, ...]]

    def arrive(self) -> _Block:
        """The block, once it is here."""
        k, v = arrived(self.flat).split([math.prod(s) for s in self.shapes])
        return _Block(k.view(self.shapes[0]), v.view(self.shapes[1]))
