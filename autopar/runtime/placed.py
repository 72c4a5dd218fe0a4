"""Experts where a placement puts them: which slot each choice goes to, and the weights of copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.grouped import arrange
from autopar.ir.placement import Placement
from autopar.runtime.axis import Axis
from autopar.runtime.collectives import exchange_rows


@dataclass(frozen=True)
class Placed:
    """A placement as tensors.

    Args:
        table: [E, most], the slots of each expert, the first one repeated behind the last. ways: [E], how many it has.
        held: [N · slots], the expert in each slot, 0 in empty ones.
        sent: where, among the experts of the first rank, those lie that the second has copies of.
        room: copies on the rank with the most.
    """

    table: Tensor
    ways: Tensor
    held: Tensor
    sent: tuple[tuple[list[int], ...], ...]
    room: int

    @staticmethod
    def of(placement: Placement) -> "Placed":
        """From the placement of a layer."""
        holders, every = placement.holders(), range(len(placement.homes))
        most = max(map(len, holders))
        return Placed(
            torch.tensor([h + h[:1] * (most - len(h)) for h in holders]),
            torch.tensor([len(h) for h in holders]),
            torch.tensor(placement.slots).clamp(min=0).reshape(-1),
            tuple(tuple(placement.sent(home, rank) for rank in every) for home in every),
            placement.room,
        )

    def slots(self, index: Tensor, coordinate: int) -> Tensor:
        """The slot of each choice [T, k]: choices of an expert take turns, beginning at another one on each rank."""
        table, ways = self.table.to(index.device), self.ways.to(index.device)
        if not self.room:
            return table[:, 0].index_select(0, index.reshape(-1)).view_as(index)
        order, ends = arrange(index, len(ways))
        expert = index.reshape(-1).index_select(0, order)
        starts = torch.cat([ends.new_zeros(1), ends])
        turn = torch.arange(len(order), device=index.device) - starts.index_select(0, expert) + coordinate
        slot = table[expert, turn % ways.index_select(0, expert)]
        return torch.empty_like(slot).index_copy(0, order, slot).view_as(index)

    def copies(self, params: Sequence[Tensor], axis: Axis) -> list[Tensor]:
        """The parameters [room, ...] of this rank's copies, from their homes; 0 where others have more.

        Communication: the copies' parameters; in the backward their gradients, which their homes add to their own.
        """
        send = self.sent[axis.coordinate]
        rows = torch.tensor([i for row in send for i in row], dtype=torch.int64, device=params[0].device)
        receive = [len(row[axis.coordinate]) for row in self.sent]
        out = []
        for p in params:
            got = exchange_rows(p.index_select(0, rows), axis, receive, [len(row) for row in send])
            out.append(torch.cat([got, got.new_zeros(self.room - len(got), *got.shape[1:])]))
        return out

    def load(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Choices of each expert [E] and of each rank [N], from those of each slot."""
        tokens = counts.new_zeros(len(self.ways)).index_add(0, self.held.to(counts.device), counts)
        return tokens, counts.view(len(self.sent), -1).sum(1)
