"""Which ranks of ``ep`` hold which experts of a layer: every expert has a home, and hot ones have copies elsewhere."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from autopar.errors import AutoparError


@dataclass(frozen=True)
class Placement:
    """The experts of one layer on N ranks.

    A copy is no parameter: the rank that computes it gets the weights from the expert's home at each forward, and sends
    the gradient back, so that state dicts, optimizers and norms know one of each expert.

    Args:
        homes: [N][E/N], the experts whose parameters each rank holds, in the order of its shard; each expert once.
        copies: [N][any], experts of other ranks that a rank computes, too. Kept in the order of their homes.

    Raises:
        AutoparError: ``bad-placement``.
    """

    homes: tuple[tuple[int, ...], ...]
    copies: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        homes, copies = _rows(self.homes), _rows(self.copies) or ((),) * len(self.homes)
        order = tuple(chain.from_iterable(homes))
        if sorted(order) != list(range(len(order))) or len({len(h) for h in homes}) != 1:
            why = f"homes {homes} do not have each expert once, and as many on every rank"
            raise AutoparError("bad-placement", why, "use autopar.place_experts")
        every = all(0 <= e < len(order) for row in copies for e in row)
        once = all(len({*h, *c}) == len(h) + len(c) for h, c in zip(homes, copies))
        if len(copies) != len(homes) or not every or not once:
            why = f"copies {copies} are not, for each rank, experts that it does not hold"
            raise AutoparError("bad-placement", why, "use autopar.place_experts")
        object.__setattr__(self, "homes", homes)
        object.__setattr__(self, "copies", tuple(tuple(sorted(c, key=order.index)) for c in copies))

    @property
    def order(self) -> tuple[int, ...]:
        """[E], the expert at each place, rank after rank."""
        return tuple(chain.from_iterable(self.homes))

    @property
    def moved(self) -> bool:
        """Whether an expert's home is another than where the model's own order puts it."""
        return self.order != tuple(range(len(self.order)))

    @property
    def room(self) -> int:
        """Copies on the rank with the most."""
        return max(map(len, self.copies))

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """[N][E/N + room], the experts that each rank computes; -1 where it has fewer copies than others."""
        return tuple(h + c + (-1,) * (self.room - len(c)) for h, c in zip(self.homes, self.copies))

    def holders(self) -> list[list[int]]:
        """For each expert its slots, counted rank after rank: that of its home first."""
        out: list[list[int]] = [[] for _ in self.order]
        own, each = len(self.homes[0]), len(self.slots[0])
        for first in (True, False):
            for slot, expert in enumerate(chain.from_iterable(self.slots)):
                if expert >= 0 and (slot % each < own) == first:
                    out[expert].append(slot)
        return out

    def imbalance(self, tokens: Sequence[float]) -> float:
        """Choices [E] of the busiest rank over their mean, where those of an expert are spread over its copies."""
        many = [len(h) for h in self.holders()]
        busy = [sum(tokens[e] / many[e] for e in h + c) for h, c in zip(self.homes, self.copies)]
        return max(busy) / max(sum(busy) / len(busy), 1.0)

    def sent(self, home: int, rank: int) -> list[int]:
        """Where, among the experts of ``home``, those lie that ``rank`` has copies of."""
        own = self.homes[home]
        return [own.index(e) for e in self.copies[rank] if e in own]


def _rows(rows: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(e) for e in row) for row in rows)


def reordered(runs: Iterable[tuple[int, int]], order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of places as runs of what is there, in the same order."""
    start, length = -1, 0
    for place in chain.from_iterable(range(first, first + size) for first, size in runs):
        if length and order[place] == start + length:
            length += 1
            continue
        if length:
            yield start, length
        start, length = order[place], 1
    if length:
        yield start, length
