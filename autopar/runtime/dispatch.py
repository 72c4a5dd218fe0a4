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
    """``ops.experts`` for this rank's tokens; coordinate c holds the experts c·E to (c+1)·E, or those ``load`` says.

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
    placed = load.at(layer)
    copies = placed.copies(params, axis) if placed is not None and placed.room else ()
    slot = index if placed is None else placed.slots(index, axis.coordinate)
    local = Local(body, params, copies)
    order, ends = arrange(slot, local.count * axis.size)
    load.note(layer, torch.diff(ends, prepend=ends.new_zeros(1)))
    if room is not None:
        back = _padded(hidden.index_select(0, order // index.shape[1]), local, ends, room, axis)
        return combine(restored(back, order), weights, dtype)
    plan = Plan.of(ends, local, axis)
    rows = hidden.index_select(0, order[: sum(plan.send)] // index.shape[1])
    arrived = exchange_rows(rows, axis, plan.receive, plan.send).index_select(0, plan.order)
    y = local.run(arrived, plan.ends, plan.own).index_select(0, plan.inverse)
    back = exchange_rows(y, axis, plan.send, plan.receive)
    return combine(restored(back, order), weights, dtype)


@dataclass(frozen=True)
class Local:
    """What a rank computes: its own experts, and behind them its copies of others'."""

    body: Body
    params: Sequence[Tensor]
    copies: Sequence[Tensor]

    @property
    def own(self) -> int:
        """Experts whose home it is."""
        return self.params[0].shape[0]

    @property
    def count(self) -> int:
        """Experts that it computes, or has room for: the same on all ranks."""
        return self.own + (self.copies[0].shape[0] if self.copies else 0)

    def run(self, rows: Tensor, ends: Tensor, own: int) -> Tensor:
        """Results of rows that are sorted by expert, of which the first ``own`` are for experts at home."""
        if not self.copies:
            return run_body(self.body, rows, self.params, ends)
        first = run_body(self.body, rows[:own], self.params, ends[: self.own])
        return torch.cat([first, run_body(self.body, rows[own:], self.copies, ends[self.own :] - own)])


def _padded(rows: Tensor, local: Local, ends: Tensor, room: int, axis: Axis) -> Tensor:
    """Results of rows that are sorted by expert, ``room`` of which each expert computes; 0 for the others.

    Communication: experts · room · H elements each way, (N-1)/N of them on the wire.
    """
    count, total = local.count, ends.shape[0]
    place = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(ends, place, right=True)
    starts = torch.cat([ends.new_zeros(1), ends])
    at = place - starts.index_select(0, expert)
    slot = torch.where((expert < total) & (at < room), expert * room + at, total * room)
    buffer = rows.new_zeros(total * room + 1, rows.shape[1]).index_copy(0, slot, rows)
    each = [count * room] * axis.size
    arrived = exchange_rows(buffer[:-1], axis, each, each).view(axis.size, count, room, -1).transpose(0, 1)
    offsets = torch.arange(1, count + 1, device=rows.device) * (axis.size * room)
    y = local.run(arrived.reshape(count * axis.size * room, -1), offsets, local.own * axis.size * room)
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
        own: rows for experts whose home is this rank.
    """

    send: list[int]
    receive: list[int]
    order: Tensor
    inverse: Tensor
    ends: Tensor
    own: int

    @staticmethod
    def of(ends: Tensor, local: Local, axis: Axis) -> "Plan":
        """From where the rows of every expert end on this rank. Collective: counts are exchanged."""
        count = local.count
        mine = torch.diff(ends, prepend=ends.new_zeros(1)).view(axis.size, count)
        theirs = exchanged(mine, axis, [1] * axis.size, [1] * axis.size) if axis.size > 1 else mine
        send, receive, own = torch.stack([mine.sum(1), theirs.sum(1), theirs[:, : local.own].sum(1)]).tolist()
        expert = torch.arange(count, device=ends.device).repeat(axis.size).repeat_interleave(theirs.reshape(-1))
        order = torch.sort(expert, stable=True).indices
        return Plan(send, receive, order, inverse_of(order), theirs.sum(0).cumsum(0), sum(own))
