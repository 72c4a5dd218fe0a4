"""Experts shared out over an axis whose ranks hold different tokens: rows travel to their experts and back.

Rows travel in chunks. While one is on its way, experts compute another, and whatever stands between ``start`` and
``finish`` runs; the backward goes the same way back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.grouped import Body, arrange, combine, inverse_of, restored, run_body
from autopar.runtime._functional import exchanged
from autopar.runtime.axis import Axis
from autopar.runtime.load import Counts
from autopar.runtime.parcels import Parcel, depart

WEIGHTS, PARAMS, DTYPE, ROOM, LAYER, CHUNKS = 2, 3, 5, 6, 7, 8  # places of arguments


def dispatched_experts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    params: Sequence[Tensor],
    body: Body,
    dtype: torch.dtype,
    room: int | None,
    layer: str,
    chunks: int | None,
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
        chunks: in how many parts rows travel; one where None.

    Communication: counts, 8E bytes a pair of ranks and chunk; then each way T·k·H elements, (N-1)/N of them on the wire
    where routing is balanced. Ranks and experts without tokens take part with nothing and get zero gradients.
    """
    return finish(start(hidden, index, params, body, room, layer, chunks, load, axis), weights, dtype)


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

    def run(self, arrived: list[Tensor], plan: "Plan") -> Tensor:
        """Results of rows, the only ones of a list, as they arrived, in the same order."""
        rows, ends, own = arrived.pop().index_select(0, plan.order), plan.ends, plan.own
        if not self.copies:
            return run_body(self.body, rows, self.params, ends).index_select(0, plan.inverse)
        first = run_body(self.body, rows[:own], self.params, ends[: self.own])
        more = run_body(self.body, rows[own:], self.copies, ends[self.own :] - own)
        return torch.cat([first, more]).index_select(0, plan.inverse)


@dataclass(frozen=True)
class Plan:
    """Of one chunk: who sends how many rows to whom, and how the rows that arrive are sorted by expert.

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


@dataclass(frozen=True)
class Uneven:
    """Rows as the choices have them: as many for each rank as chose its experts.

    Args:
        tokens: of each chunk, [T, H]. order: of each, its choices by expert. k: choices of a token.
    """

    tokens: Sequence[Tensor]
    order: Sequence[Tensor]
    k: int

    def rows(self, chunk: int, plan: Plan) -> Tensor:
        """What the chunk sends, by expert."""
        return self.tokens[chunk].index_select(0, self.order[chunk][: sum(plan.send)] // self.k)

    def choices(self, back: Sequence[Tensor]) -> Tensor:
        """Rows that came back where the choices were: [T·k, o]."""
        return _joined([restored(rows, order) for rows, order in zip(back, self.order)], 0)


@dataclass(frozen=True)
class Padded:
    """As many rows for every expert, 0 where it was not chosen so often.

    Args:
        buffer: [experts, room, H]. shares: of the room, by chunk.
        slot: place in the buffer of each choice, by expert; the one behind it where there is no room.
        order: of the choices, by expert.
    """

    buffer: Tensor
    shares: list[int]
    slot: Tensor
    order: Tensor

    @staticmethod
    def of(rows: Tensor, order: Tensor, ends: Tensor, shares: list[int]) -> "Padded":
        """From rows that are sorted by expert."""
        total, room = ends.shape[0], sum(shares)
        place = torch.arange(len(rows), device=rows.device)
        expert = torch.searchsorted(ends, place, right=True)
        starts = torch.cat([ends.new_zeros(1), ends])
        at = place - starts.index_select(0, expert)
        slot = torch.where((expert < total) & (at < room), expert * room + at, total * room)
        buffer = rows.new_zeros(total * room + 1, rows.shape[1]).index_copy(0, slot, rows)
        return Padded(buffer[:-1].view(total, room, -1), shares, slot, order)

    def rows(self, chunk: int, plan: Plan) -> Tensor:
        """What the chunk sends, by expert."""
        return self.buffer.split(self.shares, 1)[chunk].reshape(-1, self.buffer.shape[2])

    def choices(self, back: Sequence[Tensor]) -> Tensor:
        """Rows that came back where the choices were: [T·k, o]."""
        total, (width,) = len(self.buffer), {rows.shape[1] for rows in back}
        whole = _joined([rows.view(total, -1, width) for rows in back], 1).reshape(-1, width)
        found = torch.cat([whole, whole.new_zeros(1, width)]).index_select(0, self.slot)
        return restored(found, self.order)


@dataclass(frozen=True)
class Flight:
    """A dispatch on its way: what travels by which plans, and whether something is done meanwhile.

    Whoever takes rows out of a list is the last to know them, so that they are freed when they are used.
    """

    local: Local
    cargo: Uneven | Padded
    plans: list[Plan]
    parcels: list[Parcel]
    axis: Axis
    overlaps: bool


def start(
    hidden: Tensor,
    index: Tensor,
    params: Sequence[Tensor],
    body: Body,
    room: int | None,
    layer: str,
    chunks: int | None,
    load: Counts,
    axis: Axis,
) -> Flight:
    """Find out which rows go where, and send the first chunk. Arguments as in ``dispatched_experts``."""
    placed = load.at(layer)
    copies = placed.copies(params, axis) if placed is not None and placed.room else ()
    slot = index if placed is None else placed.slots(index, axis.coordinate)
    local = Local(body, params, copies)
    total, k = local.count * axis.size, index.shape[1]
    if room is not None:
        parts = min(chunks or 1, room)
        order, ends = arrange(slot, total)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        shares = [room * (i + 1) // parts - room * i // parts for i in range(parts)]
        cargo: Padded | Uneven = Padded.of(hidden.index_select(0, order // k), order, ends, shares)
        plans = [_even(share, local, axis, hidden.device) for share in shares]
    else:
        parts = chunks or 1
        found = [arrange(part, total) for part in slot.tensor_split(parts)]
        cargo = Uneven(hidden.tensor_split(parts), [order for order, _ in found], k)
        each = torch.stack([torch.diff(ends, prepend=ends.new_zeros(1)) for _, ends in found])
        counts = each.sum(0)
        plans = list(_uneven(each, local, axis))
    load.note(layer, counts, axis)
    plan, now = plans[0], chunks is not None
    return Flight(local, cargo, plans, [depart(cargo.rows(0, plan), axis, plan.receive, plan.send, now)], axis, now)


def finish(flight: Flight, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The result of a dispatch: each chunk is computed while the next one travels."""
    axis, plans, now = flight.axis, flight.plans, flight.overlaps
    back = []
    for i, plan in enumerate(plans):
        here = [flight.parcels.pop().arrive()]
        if i + 1 < len(plans):
            after = plans[i + 1]
            flight.parcels.append(depart(flight.cargo.rows(i + 1, after), axis, after.receive, after.send, now))
        back.append(depart(flight.local.run(here, plan), axis, plan.send, plan.receive, now))
    return combine(flight.cargo.choices([back.pop(0).arrive() for _ in plans]), weights, dtype)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _even(share: int, local: Local, axis: Axis, device: torch.device) -> Plan:
    """The plan of a chunk in which every rank sends each expert ``share`` rows."""
    count = local.count
    rows = [count * share] * axis.size
    order = torch.arange(axis.size * count * share, device=device).view(axis.size, count, share)
    ends = torch.arange(1, count + 1, device=device) * (axis.size * share)
    inverse = order.view(count, axis.size, share).transpose(0, 1).reshape(-1)
    return Plan(rows, rows, order.transpose(0, 1).reshape(-1), inverse, ends, local.own * axis.size * share)


def _uneven(mine: Tensor, local: Local, axis: Axis) -> Iterator[Plan]:
    """The plan of each chunk from this rank's choices of every expert in it: [chunks, N·E]. Collective."""
    parts, count, device = len(mine), local.count, mine.device
    mine = mine.view(parts, axis.size, count)
    theirs = mine.transpose(0, 1).contiguous()
    theirs = exchanged(theirs, axis, [1] * axis.size, [1] * axis.size) if axis.size > 1 else theirs
    theirs = theirs.transpose(0, 1)
    known = torch.stack([mine.sum(2), theirs.sum(2), theirs[..., : local.own].sum(2)], 1).tolist()
    for (send, receive, own), counts in zip(known, theirs):
        expert = torch.arange(count, device=device).repeat(axis.size).repeat_interleave(counts.reshape(-1))
        order = torch.sort(expert, stable=True).indices
        yield Plan(send, receive, order, inverse_of(order), counts.sum(0).cumsum(0), sum(own))
