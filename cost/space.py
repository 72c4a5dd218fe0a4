"""Every strategy that a search looks at, as columns that broadcast: sizes and rows by choices of the engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product as every
from typing import Any

import numpy as np

from autopar.cost.candidates import ORDER, SCHEDULES, Candidates
from autopar.cost.closed import Family
from autopar.cost.forms import POLICIES
from autopar.cost.polynomials import Array
from autopar.cost.schedule import check_legal
from autopar.errors import AutoparError

PLACEMENTS = (ORDER, ("pp", "dp", "ep", "tp", "cp"), ("dp", "pp", "ep", "cp", "tp"))
KINDS = {1: (("1f1b", "gpipe", "zero-bubble"),), 2: (("interleaved",), ("zbv",)), 4: (("interleaved",),)}
ENGINES = ("zero_shard_size", "prefetch", "offload")  # fields that ask for an engine that shares out states
SPLIT = tuple(SCHEDULES.index(name) for name in ("zero-bubble", "zbv"))
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Degree = tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """What is asked of a plan.

    Args:
        ranks: devices. node: devices of a node. batch: rows of the global batch. positions: of a row.
        axes: mesh axes that may have several ranks. offload: whether states lie in host memory.
        fixed: axes whose sizes are decided, in the order of the mesh. given: fields of Strategy that are decided.
    """

    ranks: int
    node: int
    batch: int
    positions: int
    axes: tuple[str, ...] = ORDER
    offload: bool = False
    fixed: tuple[tuple[str, int], ...] = ()
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def orders(self) -> tuple[tuple[str, ...], ...]:
        """Orders of the mesh's axes, major to minor, that keep the fixed ones in theirs."""
        named = tuple(axis for axis, _ in self.fixed)
        found = tuple(p for p in PLACEMENTS if tuple(a for a in p if a in named) == named)
        return found or ((*(a for a in ORDER if a not in named), *named),)


@dataclass(frozen=True)
class Grid:
    """Candidates whose columns broadcast to [sizes and rows, ZeRO, recompute, schedule, kind of cp].

    Args:
        legal: which of them exist. points: sizes and rows of all grids of this placement. part: those of this grid.
    """

    candidates: Candidates
    legal: Mask
    points: Candidates
    part: slice


def degrees(space: Space, family: Family) -> list[Degree]:
    """(pp, dp, ep, cp, tp) whose product is the number of ranks and that the family's layouts allow, in order."""
    out: list[Degree] = []
    fixed = dict(space.fixed)
    options = [_options(axis, space, family) for axis in ("pp", "ep", "cp", "tp")]
    for pp, ep, cp, tp in every(*options):
        dp, rest = divmod(space.ranks, pp * ep * cp * tp)
        positions = cp * tp * (2 if cp > 1 else 1) if family.length and (cp > 1 or family.sequence) else 1
        if rest or space.batch % (dp * ep) or space.positions % positions or dp != fixed.get("dp", dp):
            continue
        if ("dp" not in space.axes and dp > 1) or (tp == 1 and family.sequence):
            continue
        out.append((pp, dp, ep, cp, tp))
    return out


def _options(axis: str, space: Space, family: Family) -> list[int]:
    if axis not in space.axes:
        return [1]
    sizes = [n for n in range(1, space.ranks + 1) if space.ranks % n == 0]
    wanted = dict(space.fixed).get(axis)
    sizes = sizes if wanted is None else [n for n in sizes if n == wanted]
    if axis == "pp":
        return [n for n in sizes if n <= max(1, len(family.order))]
    if axis == "ep":
        return [n for n in sizes if n == 1 or (family.divisors.get("ep") and family.allows("ep", n))]
    if axis == "cp":
        known = family.length and any(u.heads[0] != 0 for u in family.units)
        return [n for n in sizes if n == 1 or known]
    return [n for n in sizes if (n <= 2 * space.node or n == wanted) and family.allows("tp", n)]


def grids(space: Space, family: Family, near: Callable[[Degree], bool] = lambda degree: True) -> Iterator[Grid]:
    """All candidates of a family: a grid for each placement, number of stages, and way of placing them."""
    if dict(space.given).get("sequence_parallel", family.sequence) != family.sequence:
        return
    found = [d for d in degrees(space, family) if near(d)]
    for place, order in enumerate(space.orders):
        rows = [(*d, n) for d in sorted(found) if _differs(place, d, space) for n in _parts(space, family, d)]
        if not rows:
            continue
        every = np.array(rows, float).T
        points = _plain(space, every, order)
        for pp in np.unique(every[0]):
            inside = np.flatnonzero(every[0] == pp)
            part = slice(int(inside[0]), int(inside[-1]) + 1)
            for virtual, kinds in _kinds(space, family, int(pp)):
                grid = _grid(space, family, points, part, virtual, kinds)
                if grid.legal.any():
                    yield grid


def _plain(space: Space, points: Array, order: tuple[str, ...]) -> Candidates:
    """Sizes and rows alone, as columns of equal length."""
    *sizes, rows = points
    by_axis, none = dict(zip(ORDER, sizes)), np.zeros(len(rows))
    parts = space.batch / (by_axis["dp"] * by_axis["ep"] * rows)
    return Candidates(by_axis, rows, parts, none, none, none, none, none, none, none, float(space.positions), order)


def _parts(space: Space, family: Family, degree: Degree) -> list[int]:
    """Rows of a microbatch on one data rank: powers of two, and all rows at once."""
    own, given = space.batch // (degree[1] * degree[2]), dict(space.given)
    wanted = given.get("microbatches")
    if wanted is None and given.get("microbatch_rows") is not None:
        wanted = next(n for n in range(1, own + 1) if own % n == 0 and own // n <= given["microbatch_rows"])
    if wanted is not None:
        return [own // wanted] if own % wanted == 0 and (family.parts or wanted == 1) else []
    if not family.parts:
        return [own]
    found = {n for n in (1, 2, 4, 8, 16, 32) if own % n == 0} | {own}
    return sorted(n for n in found if degree[0] == 1 or own // n > 1 or n == own)


def _differs(place: int, degree: Degree, space: Space) -> bool:
    """Whether the placement differs from those before it: only axes of several ranks can change places."""
    sizes = dict(zip(ORDER, degree))
    seen = [tuple(a for a in order if sizes[a] > 1) for order in space.orders[: place + 1]]
    return seen[-1] not in seen[:-1] and (place == 0 or space.orders[place][0] == "pp" or space.ranks > space.node)


def _kinds(space: Space, family: Family, pp: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(stages a rank, schedules) for so many ranks of a pipeline."""
    given = dict(space.given)
    schedule, stages = given.get("schedule"), given.get("virtual_stages")
    if pp == 1:
        if schedule is None and stages is None:  # who names either wants a pipeline
            yield 1, ("1f1b",)
        return
    for virtual in KINDS if stages is None else (stages,):
        groups = KINDS.get(virtual, (("interleaved",),)) if schedule is None else ((schedule,),)
        for kinds in groups:
            if pp * virtual <= len(family.order) and all(_legal(k, pp, virtual) for k in kinds):
                yield virtual, kinds


def _legal(schedule: str, pp: int, virtual: int) -> bool:
    """Whether the schedule runs so many stages a rank, with microbatches enough."""
    try:
        check_legal(schedule, pp, virtual, pp * virtual)
    except AutoparError:
        return False
    return True


def _grid(
    space: Space, family: Family, points: Candidates, part: slice, virtual: int, kinds: Sequence[str]
) -> Grid:  # fmt: skip
    sizes = {axis: n[part].reshape(-1, 1, 1, 1, 1) for axis, n in points.sizes.items()}
    pp, dp, ep, cp, tp = (sizes[axis] for axis in ORDER)
    rows, parts = (n[part].reshape(-1, 1, 1, 1, 1) for n in (points.rows, points.microbatches))
    data, node = dp * ep * cp, np.maximum(1, space.node // tp)
    zero = np.array([0, 1, 2, 3, 1, 3], float).reshape(1, -1, 1, 1, 1)
    copies = np.array([0, 0, 0, 0, 1, 1]).reshape(1, -1, 1, 1, 1)
    policies = range(3) if family.order or "recompute" in dict(space.given) else (0,)  # blocks alone recompute
    recompute = np.array(policies, float).reshape(1, 1, -1, 1, 1)
    schedule = np.array([float(SCHEDULES.index(k)) for k in kinds]).reshape(1, 1, 1, -1, 1)
    ulysses = np.arange(2.0).reshape(1, 1, 1, 1, -1)
    shard = np.where(copies == 1, node, 0)
    wanted = dict(space.given)
    if wanted.get("zero_shard_size"):
        zero, copies = np.arange(4.0).reshape(1, -1, 1, 1, 1), np.array([0, 1, 1, 1]).reshape(1, -1, 1, 1, 1)
        shard = np.where(copies == 1, wanted["zero_shard_size"], 0) + 0 * node
    heads = np.isin(tp * cp, [n for n in np.unique(tp * cp) if family.allows("tp", int(n))])
    split = np.isin(schedule, SPLIT)
    legal = (
        ((zero == 0) | (data > 1) | ("zero" in wanted))
        & ((copies == 0) | _copies(shard, data, bool(wanted.get("zero_shard_size"))))
        & ((ulysses == 0) | ((cp > 1) & heads))
        & ~(split & ((recompute > 0) | ((zero > 1) & (pp > 1))))
        & (np.array(space.offload) <= (zero > 0))
        & _runs(schedule, pp, virtual, parts, wanted.get("schedule") is not None)
        & _asked(wanted, zero, shard, recompute, ulysses, cp)
    )  # fmt: skip
    one = np.ones((1,) * 5)
    table = Candidates(
        sizes, rows, parts, zero, shard + 0 * zero, recompute, schedule, virtual * one, space.offload * one, ulysses,
        points.positions, points.order,
    )  # fmt: skip
    return Grid(table, np.broadcast_to(legal, table.shape), points, part)


def _runs(schedule: Array, pp: Array, virtual: int, parts: Array, named: bool) -> Mask:
    """Whether the schedule can run so many microbatches: the rules of ``schedule.check_legal``.

    1F1B where they fill the pipeline, else GPipe; GPipe also where the user has named it.
    """
    fills, kind = parts >= pp * (virtual if virtual > 1 else 1), {n: SCHEDULES.index(n) for n in SCHEDULES}
    rounds = parts % np.maximum(1, parts // pp) == 0
    ok = np.where(schedule == kind["1f1b"], fills, True)
    ok &= np.where(schedule == kind["gpipe"], ~fills | named, True)
    ok &= np.where(np.isin(schedule, (kind["interleaved"], kind["zero-bubble"])), rounds, True)
    return np.where(schedule == kind["zbv"], fills, ok) | (pp == 1)


def _copies(shard: Array, data: Array, asked: bool) -> Mask:
    """Whether so many data ranks can share out a copy; all of them, and one alone, where the user says so."""
    return ((shard > 1) & (data > shard) | asked) & (data % np.maximum(shard, 1) == 0)


def _asked(given: dict[str, Any], zero: Array, shard: Array, recompute: Array, ulysses: Array, cp: Array) -> Mask:
    """Whether the engine is what the user has decided."""
    ok = np.ones((1,) * 5, bool)
    if "zero" in given:
        ok = ok & (zero == given["zero"])
    if any(given.get(name) not in (None, 0, "none") for name in ENGINES):
        ok = ok & (zero > 0)
    if "zero_shard_size" in given:
        ok = ok & (shard == (given["zero_shard_size"] or 0))
    if "recompute" in given:
        ok = ok & (recompute == POLICIES.index(given["recompute"]))
    if given.get("context_parallel"):
        ok = ok & ((cp == 1) | (ulysses == (given["context_parallel"] == "ulysses")))
    return ok
