"""The search: every family's candidates priced as grids, kept where they fit, ranked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.cost.forms import POLICIES, Forms
from autopar.cost.hardware import Hardware
from autopar.cost.polynomials import Array
from autopar.cost.regime import Regime
from autopar.cost.space import Space, candidates
from autopar.cost.step import ORDER, SCHEDULES, Candidates, Steps, steps


@dataclass(frozen=True)
class Option:
    """One candidate and its price. Seconds, bytes.

    Args:
        sizes: ranks by axis. order: of the mesh's axes, major to minor. sequence: positions sharded over tp.
        exposed: seconds of communication that nothing hides, by axis. memory: by kind, of the fullest rank.
    """

    sizes: dict[str, int]
    order: tuple[str, ...]
    sequence: bool
    rows: int
    microbatches: int
    zero: int
    shard: int
    recompute: str
    schedule: str
    virtual: int
    offload: bool
    context: str
    seconds: float
    compute: float
    bubble: float
    optimizer: float
    exposed: dict[str, float]
    memory: dict[str, float]
    flops: float

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def mesh(self) -> str:
        """Axes of several ranks as text, major to minor."""
        return ",".join(f"{a}={self.sizes[a]}" for a in self.order if self.sizes[a] > 1) or "dp=1"

    @property
    def strategy(self) -> str:
        """Fields of a Strategy that differ from its defaults, as text."""
        pipeline = self.sizes["pp"] > 1
        given = {
            "sequence_parallel": self.sequence, "context_parallel": self.context, "zero": self.zero,
            "zero_shard_size": self.shard, "microbatches": self.microbatches if self.microbatches > 1 else 0,
            "schedule": self.schedule if pipeline else "", "virtual_stages": self.virtual if self.virtual > 1 else 0,
            "recompute": self.recompute if self.recompute != "none" else "", "offload": "cpu" if self.offload else "",
        }  # fmt: skip
        return ",".join(f"{k}={'true' if v is True else v}" for k, v in given.items() if v)

    def key(self) -> tuple[object, ...]:
        """What tells options apart: an order that does not depend on the machine."""
        sizes = tuple(self.sizes[a] for a in ORDER)
        return (*sizes, self.order, self.sequence, self.rows, self.zero, self.shard, self.recompute, self.schedule,
                self.virtual, self.offload, self.context)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """The candidates of one family and placement, priced."""

    forms: Forms
    candidates: Candidates
    steps: Steps

    @cached_property
    def peak(self) -> Array:
        """Bytes of the fullest rank of each."""
        return self.steps.peak

    def option(self, i: int) -> Option:
        """One row."""
        c, s = self.candidates, self.steps
        sizes = {a: int(c.sizes[a][i]) for a in ORDER}
        context = "" if sizes["cp"] == 1 else "ulysses" if c.ulysses[i] else "ring"
        return Option(
            sizes, c.order, self.forms.family.sequence, int(c.rows[i]), int(c.microbatches[i]), int(c.zero[i]),
            int(c.shard[i]), POLICIES[int(c.recompute[i])], SCHEDULES[int(c.schedule[i])], int(c.virtual[i]),
            bool(c.offload[i]), context, float(s.seconds[i]), float(s.compute[i]), float(s.bubble[i]),
            float(s.optimizer[i]), {a: float(v[i]) for a, v in s.exposed.items() if v[i] > 0},
            {k: float(v[i]) for k, v in s.memory.items()}, float(s.flops[i]),
        )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a search found. ``limit``: bytes that a rank may hold."""

    tables: tuple[Table, ...]
    limit: float

    @property
    def count(self) -> int:
        """Candidates priced."""
        return sum(len(t.candidates) for t in self.tables)

    def best(self, count: int) -> list[Option]:
        """The fastest that fit, fastest first; ties by memory, then by the order of their fields."""
        return self._ranked(count, fits=True)

    def smallest(self, count: int = 1) -> list[Option]:
        """Those with the least memory, whether they fit or not."""
        found = [t.option(i) for t in self.tables for i in np.argsort(t.peak, kind="stable")[:count]]
        return sorted(found, key=lambda o: (o.peak, o.seconds, o.key()))[:count]

    def _ranked(self, count: int, fits: bool) -> list[Option]:
        found: list[Option] = []
        for table in self.tables:
            inside = np.flatnonzero(table.peak <= self.limit)
            order = np.lexsort((table.peak[inside], table.steps.seconds[inside]))
            found += [table.option(i) for i in inside[order[: 4 * count]]]
        return sorted(found, key=lambda o: (round(o.seconds, 9), round(o.peak), o.key()))[:count]

    def front(self) -> list[Option]:
        """The Pareto front of seconds and memory: nothing that fits is both faster and smaller. Fastest first."""
        found = [t.option(i) for t in self.tables for i in _front(t.steps.seconds, t.peak, self.limit)]
        out: list[Option] = []
        for option in sorted(found, key=lambda o: (round(o.seconds, 9), o.peak, o.key())):
            if not out or option.peak < out[-1].peak:
                out.append(option)
        return out


def search(families: Sequence[Forms], hardware: Hardware, space: Space, regime: Regime, limit: float) -> Found:
    """Price every candidate; where nothing fits, those with states in host memory too."""
    tables = tuple(_tables(families, hardware, space, regime))
    found = Found(tables, limit)
    if not found.best(1) and not space.offload:
        more = tuple(_tables(families, hardware, replace(space, offload=True), regime))
        found = Found((*tables, *more), limit)
    return found


def _tables(families: Sequence[Forms], hardware: Hardware, space: Space, regime: Regime) -> Iterator[Table]:
    for forms in families:
        for table in candidates(space, forms.family):
            yield Table(forms, table, steps(forms, hardware, table, regime))


def _front(seconds: Array, peak: Array, limit: float) -> list[int]:
    """Indices of the Pareto front among those that fit."""
    inside = np.flatnonzero(peak <= limit)
    order = inside[np.lexsort((peak[inside], seconds[inside]))]
    lowest = np.minimum.accumulate(peak[order]) if len(order) else peak[order]
    keep = np.r_[True, peak[order][1:] < lowest[:-1]] if len(order) else np.zeros(0, bool)
    return [int(i) for i in order[keep]]
