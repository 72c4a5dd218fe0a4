"""Stages of a chain of units: contiguous, as even as can be, within the memory of their ranks.

The slowest stage is made as fast as possible by dynamic programming over cuts (minimum of maxima); among those cuts,
the sum of squared stage times is least; among equal ones, the first in the order of the search. A rank that holds
several stages sums their memory, which dynamic programming over one chain cannot see: where its answer does not fit,
all cuts are tried if they are few, else its cut is mended by moving units from stage to stage, to a cut that no single
move improves (``cost.coupled``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from autopar.cost.coupled import DIGITS, Coupled, Matrix, least_maximum, least_sum
from autopar.cost.schedule import Schedule, in_flight, occupancies
from autopar.cost.table import size
from autopar.cost.timeline import Times
from autopar.errors import AutoparError

SLACK = 1 + 1e-9  # of comparisons between sums that were added in another order


@dataclass(frozen=True)
class Unit:
    """A piece of the model that stays on one stage: a block, or what stands before, between or behind blocks.

    Args:
        name: path of the block, or of the first module.
        forward, input, weight: seconds of one microbatch: forward, gradients of inputs, gradients of weights.
        parameters: bytes. states: bytes of parameters, gradients and optimizer.
        activations: bytes that one microbatch keeps from its forward to its backward.
        starts: whether a stage may begin here.
    """

    name: str
    forward: float
    input: float
    weight: float
    parameters: float = 0
    states: float = 0
    activations: float = 0
    starts: bool = True

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class Balance:
    """A chain cut in stages.

    Args:
        starts: the first unit of each stage; the first is 0.
    """

    units: tuple[Unit, ...]
    schedule: Schedule
    starts: tuple[int, ...]

    def units_of(self, stage: int) -> tuple[Unit, ...]:
        """The stage's units."""
        return self.units[self.starts[stage] : (*self.starts, len(self.units))[stage + 1]]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each stage for one microbatch, forward and backward."""
        return tuple(sum(u.seconds for u in self.units_of(s)) for s in range(self.schedule.stages))

    @property
    def slowest_over_mean(self) -> float:
        """1 where all stages take equally long."""
        return max(self.seconds) * len(self.seconds) / sum(self.seconds) if sum(self.seconds) else 1.0

    @property
    def bytes(self) -> tuple[float, ...]:
        """Of each rank at its fullest moment: the states of its stages, and activations in flight."""
        return tuple(self._bytes(rank) for rank in range(self.schedule.ranks))

    def _bytes(self, rank: int) -> float:
        stages = [self.units_of(s) for s in self.schedule.stages_of(rank)]
        alive = [sum(u.activations for u in units) for units in stages]
        moments = occupancies(self.schedule, rank)
        return sum(u.states for units in stages for u in units) + max(
            sum(n * a for n, a in zip(moment, alive)) for moment in moments
        )

    def times(self, sends: Sequence[tuple[float, float]] = ()) -> Times:
        """For ``simulate``; ``sends``: seconds of activations and of gradients across each cut."""
        stages = [self.units_of(s) for s in range(self.schedule.stages)]
        parts = ((u.forward for u in s) for s in stages), ((u.input for u in s) for s in stages)
        forward, backward = (tuple(map(sum, part)) for part in parts)
        return Times(forward, backward, tuple(sum(u.weight for u in s) for s in stages), tuple(sends))


def balance(units: Sequence[Unit], schedule: Schedule, limit: float | None = None) -> Balance:
    """The stages whose slowest is fastest, each rank within ``limit`` bytes.

    Raises AutoparError ``too-many-stages``, and ``stage-memory`` where no cut fits, saying by how much.
    """
    places = sum(u.starts for u in units[1:]) + 1
    if schedule.stages > places:
        what = f"{schedule.stages} stages ({schedule.ranks} ranks × {schedule.stages // schedule.ranks}) for a model"
        fix = f"pp × virtual_stages of at most {places}"
        raise AutoparError("too-many-stages", f"{what} of {places} blocks, the places where a stage can begin", fix)
    return Balance(tuple(units), schedule, _Problem(units, schedule, limit).solve())


def at_names(units: Sequence[Unit], schedule: Schedule, names: Sequence[str]) -> Balance:
    """The stages that begin at the units of these names, whatever they cost.

    Args:
        names: one for each stage, or for each but the first. What stands before the first name joins the first stage.

    Raises AutoparError ``stage-names``.
    """
    known = [u.name for u in units]
    fix = f"name the blocks that {schedule.stages} stages begin with, in order, among {_brief(known)}"
    for name in names:
        if name not in known:
            raise AutoparError("stage-names", f"stages: the model has no block {name!r}", fix)
        if not units[known.index(name)].starts:
            raise AutoparError("stage-names", f"stages: no stage can begin at {name!r}", fix)
    places = [known.index(name) for name in names]
    if len(places) == schedule.stages:
        places = places[1:] if places[0] < (*places[1:], len(known))[0] else []
    if len(places) != schedule.stages - 1 or places != sorted({*places} - {0}):
        raise AutoparError("stage-names", f"stages={list(names)}: {len(names)} names for {schedule.stages} stages", fix)
    return Balance(tuple(units), schedule, (0, *places))


def _brief(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 12 else (*names[:8], "...", *names[-3:]))


@cache
def even_starts(seconds: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """The first of the units of each stage, whose slowest is fastest, then those whose sum of squares is least."""
    tables = [_sums(seconds, range(len(seconds) + 1))] * stages
    return _even(tables, least_maximum(tables))


def filled_starts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first of the units of each stage where one is full as soon as the sum so far passes its share of the total.

    A unit that passes it stays, so the first stages have more; those that nothing is left for start behind the last
    unit. So nanotron places blocks (``models/base.py``, ``build_model``).
    """
    starts, total, so_far = [0], float(sum(costs)), 0.0
    for i, cost in enumerate(costs):
        so_far += cost
        if so_far >= total * (len(starts) / stages) * (1 - 1e-9):
            starts.append(i + 1)
    return tuple((starts + [len(costs)] * stages)[:stages])


def _even(tables: Sequence[Matrix], most: float) -> tuple[int, ...]:
    """The cut with the least sum of squares among those whose stages have ``most`` at most."""
    parts = [np.round(np.square(table / (most or 1.0)), DIGITS) for table in tables]
    starts = least_sum([np.where(t <= most * SLACK, part, np.inf) for t, part in zip(tables, parts)])
    assert starts is not None
    return starts


def _sums(values: Sequence[float], places: Sequence[int]) -> Matrix:
    """The sum of the values between two places; infinity where the second does not lie behind the first."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])[list(places)]
    return np.where(np.triu(np.ones((len(total),) * 2), 1) > 0, total[None, :] - total[:, None], np.inf)


class _Problem:
    """Tables by (first place, place behind the last one) of a stage: seconds, bytes of states and of a microbatch."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule, limit: float | None) -> None:
        self.schedule, self.limit, self.units = schedule, limit, units
        self.places = [0, *(i for i, u in enumerate(units) if i and u.starts), len(units)]
        self.seconds = _sums([u.seconds for u in units], self.places)
        self.states = _sums([u.states for u in units], self.places)
        self.activations = _sums([u.activations for u in units], self.places)
        alone = [self.states + n * self.activations for n in in_flight(schedule)]
        self.bytes = [np.where(self.seconds < np.inf, table, np.inf) for table in alone]

    def solve(self) -> tuple[int, ...]:
        """The first unit of each stage. Raises AutoparError ``stage-memory``."""
        limit = np.inf if self.limit is None else self.limit * SLACK
        tables = [np.where(table <= limit, self.seconds, np.inf) for table in self.bytes]
        slowest = least_maximum(tables)
        starts = _even(tables, slowest) if slowest < np.inf else None
        if starts is None:
            raise self._too_large(_even(self.bytes, least_maximum(self.bytes)))
        if max(self._cut(starts).bytes) > limit:
            starts = self._coupled(starts, slowest)
        return self._cut(starts).starts

    def _cut(self, starts: Sequence[int]) -> Balance:
        return Balance(tuple(self.units), self.schedule, tuple(self.places[i] for i in starts))

    def _coupled(self, starts: tuple[int, ...], slowest: float) -> tuple[int, ...]:
        """A cut whose ranks fit, for stages that would fit alone."""
        assert self.limit is not None
        ranks, scale = range(self.schedule.ranks), slowest or 1.0
        rows = [(self.schedule.stages_of(r), moment) for r in ranks for moment in occupancies(self.schedule, r)]
        tables = self.seconds / scale, self.states / self.limit, self.activations / self.limit
        program = Coupled(rows, *tables, self.schedule.stages)
        smallest = _even(self.bytes, least_maximum(self.bytes))
        found, score = program.best(starts, smallest)
        if score[0] > 0:
            raise self._too_large(found)
        return found

    def _too_large(self, starts: Sequence[int]) -> AutoparError:
        """The refusal, with what the cut that needs least, or the least one that was found, holds."""
        assert self.limit is not None
        cut = self._cut(starts)
        held = max(cut.bytes)
        rank = cut.bytes.index(held)
        stages = [cut.units_of(s) for s in self.schedule.stages_of(rank)]
        where = " and ".join(f"{s[0].name} to {s[-1].name}" for s in stages)
        what = f"stages do not fit {size(self.limit)}: the smallest cut needs {size(held)} on rank {rank} ({where})"
        fix = "more pp or tp, zero, recompute, smaller microbatches, or a schedule with fewer of them in flight"
        return AutoparError("stage-memory", f"{what}, {size(held - self.limit)} too much", fix)
