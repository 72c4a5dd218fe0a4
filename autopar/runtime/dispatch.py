"""Experts shared out over an axis whose ranks hold different tokens: rows travel to their experts and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.grouped import Body, arrange, combine, inverse_of, restored, run_body
from autopar.runtime._functional import exchanged
from autopar.runtime.axis import Axis
from autopar.runtime.collectives import exchange_rows
from autopar.runtime.load import Counts

ROOM = 6  # place of the argument


def dispatched_experts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    params: Sequence[Tensor],
    body: Body,
    dtype: torch.dtype,
    room: int | None,
    layer: str,
    load: Counts,
    axis: Axis,
) -> Tensor:
    """``ops.experts`` for this rank's tokens, where coordinate c holds the experts c·E to (c+1)·E.

    Args:
        hidden: [T, H], this rank's tokens. index: [T, k], among all experts. weights: [T, k].
        params: this rank's stacked parameters [E, ...].
        body: what one expert computes.
        dtype: of the result.
        room: where given, every rank sends as many rows to each expert, so that shapes do not depend on values: missing
            rows are 0, and choices beyond them add nothing to the result. The same on all ranks.
        layer, load: name of the layer, and what takes note of its choices.

    Communication: counts, 8E bytes a pair of ranks; then each way T·k·H elements, (N-1)/N of them on the wire where
    routing is balanced. Ranks and experts without tokens take part with nothing and get zero gradients.
    """
    count = params[0].shape[0]
    order, ends = arrange(index, count * axis.size)
    load.note(layer, torch.diff(ends, prepend=ends.new_zeros(1)))
    if room is not None:
        back = _padded(hidden.index_select(0, order // index.shape[1]), params, body, ends, room, axis)
        return combine(restored(back, order), weights, dtype)
    plan = Plan.of(ends, count, axis)
    rows = hidden.index_select(0, order[: sum(plan.send)] // index.shape[1])
    arrived = exchange_rows(rows, axis, plan.receive, plan.send).index_select(0, plan.order)
    y = run_body(body, arrived, params, plan.ends).index_select(0, plan.inverse)
    back = exchange_rows(y, axis, plan.send, plan.receive)
    return combine(restored(back, order), weights, dtype)


def _padded(rows: Tensor, params: Sequence[Tensor], body: Body, ends: Tensor, room: int, axis: Axis) -> Tensor:
    """Results of rows that are sorted by expert, ``room`` of which each expert computes; 0 for the others.

    Communication: experts · room · H elements each way, (N-1)/N of them on the wire.
    """
    count, total = params[0].shape[0], ends.shape[0]
    place = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(ends, place, right=True)
    starts = torch.cat([ends.new_zeros(1), ends])
    at = place - starts.index_select(0, expert)
    slot = torch.where((expert < total) & (at < room), expert * room + at, total * room)
    buffer = rows.new_zeros(total * room + 1, rows.shape[1]).index_copy(0, slot, rows)
    each = [count * room] * axis.size
    arrived = exchange_rows(buffer[:-1], axis, each, each).view(axis.size, count, room, -1).transpose(0, 1)
    offsets = torch.arange(1, count + 1, device=rows.device) * (axis.size * room)
    y = run_body(body, arrived.reshape(count * axis.size * room, -1), params, offsets)
    home = y.view(count, axis.size, room, -1).transpose(0, 1).reshape(total * room, -1)
    back = exchange_rows(home, axis, each, each)
    return torch.cat([back, back.new_zeros(1, back.shape[1])]).index_select(0, slot)


@dataclass(frozen=True)
class Plan:
    """Who sends how many rows to whom, and how the rows that arrive are sorted by expert.

    Args:
        send, receive: rows to and from each coordinate.
        order: of the rows that arrived, by expert; ``inverse`` undoes it.
        ends: where the rows of each of this rank's experts end.
    """

    send: list[int]
    receive: list[int]
    order: Tensor
    inverse: Tensor
    ends: Tensor

    @staticmethod
    def of(ends: Tensor, count: int, axis: Axis) -> "Plan":
        """From where the rows of every expert end on this rank. Collective: counts are exchanged."""
        mine = torch.diff(ends, prepend=ends.new_zeros(1)).view(axis.size, count)
        theirs = exchanged(mine, axis, [1] * axis.size, [1] * axis.size) if axis.size > 1 else mine
        send, receive = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
        expert = torch.arange(count, device=ends.device).repeat(axis.size).repeat_interleave(theirs.reshape(-1))
        order = torch.sort(expert, stable=True).indices
        return Plan(send, receive, order, inverse_of(order), theirs.sum(0).cumsum(0))
