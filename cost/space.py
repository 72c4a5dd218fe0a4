"""Every strategy that a search looks at, as columns of numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product as every
from typing import Any

import numpy as np

from autopar.cost.family import Family
from autopar.cost.step import SCHEDULES, Candidates

PLACEMENTS = (("pp", "dp", "ep", "cp", "tp"), ("pp", "dp", "ep", "tp", "cp"), ("dp", "pp", "ep", "cp", "tp"))
VIRTUAL = (2, 4)


@dataclass(frozen=True)
class Space:
    """What is asked of a plan.

    Args:
        ranks: devices. node: devices of a node. batch: rows of the global batch. positions: of a row.
        axes: mesh axes that may have several ranks. offload: whether states lie in host memory.
    """

    ranks: int
    node: int
    batch: int
    positions: int
    axes: tuple[str, ...] = ("pp", "dp", "ep", "cp", "tp")
    offload: bool = False


def degrees(space: Space, family: Family) -> list[tuple[int, ...]]:
    """(pp, dp, ep, cp, tp) whose product is the number of ranks and that the family's layouts allow, in order."""
    out: list[tuple[int, ...]] = []
    options = [_options(axis, space, family) for axis in ("pp", "ep", "cp", "tp")]
    for pp, ep, cp, tp in every(*options):
        dp, rest = divmod(space.ranks, pp * ep * cp * tp)
        positions = cp * tp * (2 if cp > 1 else 1) if family.length and (cp > 1 or family.sequence) else 1
        if rest or space.batch % (dp * ep) or ("dp" not in space.axes and dp > 1) or space.positions % positions:
            continue
        if tp == 1 and family.sequence:
            continue
        out.append((pp, dp, ep, cp, tp))
    return out


def _options(axis: str, space: Space, family: Family) -> list[int]:
    if axis not in space.axes:
        return [1]
    sizes = [n for n in range(1, space.ranks + 1) if space.ranks % n == 0]
    if axis == "pp":
        return [n for n in sizes if n <= len(family.order)]
    if axis == "ep":
        return [n for n in sizes if family.allows("ep", n)] if family.divisors.get("ep") else [1]
    if axis == "cp":
        return sizes if family.length and any(u.heads[0] != 0 for u in family.units) else [1]
    return [n for n in sizes if n <= 2 * space.node and family.allows("tp", n)]


def candidates(space: Space, family: Family) -> Iterator[Candidates]:
    """All candidates of a family, one table for each placement."""
    points = [(d, rows) for d in degrees(space, family) for rows in _microbatches(space, d)]
    for place, order in enumerate(PLACEMENTS):
        table = [
            (*d, rows, space.batch // (d[1] * d[2] * rows), *choice)
            for d, rows in points
            if _differs(place, d, space)
            for choice in _choices(space, family, d, space.batch // (d[1] * d[2] * rows))
        ]
        if table:
            yield _columns(np.array(table, dtype=float), space, order)


def _microbatches(space: Space, degree: Sequence[int]) -> list[int]:
    """Rows of a microbatch on one data rank: powers of two, and all rows at once."""
    rows = space.batch // (degree[1] * degree[2])
    return [n for n in (1, 2, 4, 8, 16, 32) if rows % n == 0 and (degree[0] == 1 or rows // n > 1 or n == rows)]


def _differs(place: int, degree: Sequence[int], space: Space) -> bool:
    """Whether the placement differs from those before it: only axes of several ranks can change places."""
    pp, dp, ep, cp, tp = degree
    if place == 1:
        return cp > 1 and tp > 1
    return place == 0 or (pp > 1 and dp > 1 and space.ranks > space.node)


def _choices(space: Space, family: Family, degree: Sequence[int], microbatches: int) -> list[tuple[int, ...]]:
    """(zero, shard, recompute, schedule, virtual, offload, ulysses)."""
    pp, dp, ep, cp, tp = degree
    data = dp * ep * cp
    shards = [(0, 0)]
    if data > 1:
        shards = [(z, 0) for z in range(4)]
        if data > space.node and space.node >= tp > 0 and space.node // tp > 1:
            shards += [(z, space.node // tp) for z in (1, 3)]
    schedules = list(_schedules(family, pp, microbatches))
    offload = (1,) if space.offload else (0,)
    turns = (0, 1) if cp > 1 and family.allows("tp", tp * cp) else (0,)
    return [
        (z, s, r, k, v, o, u)
        for (z, s), r, (k, v), o, u in every(shards, range(3), schedules, offload, turns)
        if not (pp > 1 and z > 1 and SCHEDULES[k] in ("zero-bubble", "zbv"))
    ]


def _schedules(family: Family, pp: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """(schedule, stages a rank) that the number of microbatches allows; see the schedules' own rules."""
    if pp == 1:
        yield 0, 1
        return
    yield (0, 1) if microbatches >= pp else (1, 1)
    rounds = microbatches % max(1, microbatches // pp) == 0
    for v in VIRTUAL if rounds else ():
        if pp * v <= len(family.order):
            yield SCHEDULES.index("interleaved"), v
    if rounds:
        yield SCHEDULES.index("zero-bubble"), 1
    if 2 * pp <= len(family.order) and microbatches >= pp:
        yield SCHEDULES.index("zbv"), 2


def _columns(table: Any, space: Space, order: tuple[str, ...]) -> Candidates:
    sizes = dict(zip(("pp", "dp", "ep", "cp", "tp"), table.T[:5]))
    columns: Any = table.T[5:]
    rows, parts, zero, shard, policy, schedule, virtual, offload, ulysses = columns
    return Candidates(
        sizes, rows, parts, zero, shard, policy, schedule, virtual, offload, ulysses, float(space.positions), order
    )
