"""The search: every family's candidates priced as grids; the best, the smallest and the front are kept, and ranked."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.cost.candidates import ORDER, SCHEDULES, Candidates
from autopar.cost.forms import POLICIES, Forms
from autopar.cost.hardware import Hardware
from autopar.cost.polynomials import Array
from autopar.cost.regime import Regime
from autopar.cost.space import Grid, Space, grids
from autopar.cost.step import Group, Steps, steps
from autopar.cost.table import size
from autopar.cost.work import times_of

HOST_USABLE = 0.9  # of a node's host memory: what the system, data loaders and buffers leave
KEEP = 64  # of the fastest, from which the ranking is made


@dataclass(frozen=True)
class Option:
    """One candidate and its price. Seconds, bytes.

    Args:
        sizes: ranks by axis. order: of the mesh's axes, major to minor. sequence: positions sharded over tp.
        exposed: seconds of communication that nothing hides, by axis. memory: by kind, of the fullest rank.
        host: bytes of a rank's states in host memory.
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
    host: float = 0.0

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def rank(self) -> tuple[float, float, float]:
        """What is better is less: seconds, then a rank's own work, which communication may hide, then bytes."""
        return round(self.seconds, 9), round(self.compute, 9), round(self.peak)

    @property
    def mesh(self) -> str:
        """Axes of several ranks as text, major to minor."""
        return ",".join(f"{a}={self.sizes[a]}" for a in self.order if self.sizes[a] > 1) or "dp=1"

    @property
    def words(self) -> str:
        """Mesh and strategy, in one line."""
        return f"{self.mesh} {self.strategy}".strip()

    @property
    def strategy(self) -> str:
        """Fields of a Strategy that differ from its defaults, as text."""
        pipeline = self.sizes["pp"] > 1
        parts = self.microbatches if pipeline or self.microbatches > 1 else 0  # a pipeline's default is more than one
        given = {
            "sequence_parallel": self.sequence, "context_parallel": self.context, "zero": self.zero,
            "zero_shard_size": self.shard, "microbatches": parts,
            "schedule": self.schedule if pipeline else "", "virtual_stages": self.virtual if self.virtual > 1 else 0,
            "recompute": self.recompute if self.recompute != "none" else "", "offload": "cpu" if self.offload else "",
        }  # fmt: skip
        return ",".join(f"{k}={'true' if v is True else v}" for k, v in given.items() if v)

    def candidates(self, positions: int) -> Candidates:
        """The option as columns of one row. ``positions``: of a row."""
        values = {
            "rows": self.rows, "microbatches": self.microbatches, "zero": self.zero, "shard": self.shard,
            "recompute": POLICIES.index(self.recompute), "schedule": SCHEDULES.index(self.schedule),
            "virtual": self.virtual, "offload": self.offload, "ulysses": self.context == "ulysses",
        }  # fmt: skip
        columns = {name: np.array([float(v)]) for name, v in values.items()}
        sizes = {axis: np.array([float(n)]) for axis, n in self.sizes.items()}
        return Candidates(sizes, **columns, positions=float(positions), order=self.order)

    def key(self) -> tuple[object, ...]:
        """What tells options apart: an order that does not depend on the machine."""
        sizes = tuple(self.sizes[a] for a in ORDER)
        return (*sizes, self.order, self.sequence, self.rows, self.zero, self.shard, self.recompute, self.schedule,
                self.virtual, self.offload, self.context)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """All that a price depends on. ``limit``: bytes that a rank may hold on its device."""

    forms: tuple[Forms, ...]
    hardware: Hardware
    space: Space
    regime: Regime
    limit: float
    _known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def host_limit(self) -> float:
        """Bytes that a rank may hold in host memory: an equal share of what its node has to give."""
        return HOST_USABLE * self.hardware.host_memory / min(self.space.node, self.space.ranks)

    def filled(self, peak: Any, host: Any) -> Any:
        """How full the fuller of two memories is, as parts of what a rank may hold; more than 1 does not fit."""
        return np.maximum(peak / self.limit, host / self.host_limit)

    def fits(self, option: Option) -> bool:
        """Whether a rank holds no more than it may, on its device and in host memory."""
        return bool(self.filled(option.peak, option.host) <= 1)

    def smallest(self, option: Option) -> tuple[float, float, object]:
        """A key by which the option that is nearest to fitting is the first."""
        return float(self.filled(option.peak, option.host)), option.seconds, option.key()

    def over(self, option: Option) -> str:
        """What of an option does not fit, by how much; on the device first."""
        if option.peak > self.limit:
            return f"{size(option.peak - self.limit)} over"
        return f"{size(option.host - self.host_limit)} over in host memory"

    def hosted(self, forms: Forms, grid: Grid) -> Array:
        """Bytes in host memory of a grid's candidates, flat; zeros where states do not lie there."""
        if not self.space.offload:
            return np.zeros(grid.legal.size)
        found = Group(forms, self.hardware, grid.candidates, self.regime).hosted().max(axis=0)
        return np.broadcast_to(found, grid.legal.shape).reshape(-1)

    def totals(self, forms: Forms, grid: Grid) -> tuple[Array, Array]:
        """Seconds and bytes of a grid's candidates, in its shape; what units take is shared by grids of a placement."""
        if self._known.get("points") is not grid.points:
            self._known.update(points=grid.points, times=times_of(forms, self.hardware, grid.points))
        times = [t.at(grid.part) for t in self._known["times"]]
        found = Group(forms, self.hardware, grid.candidates, self.regime, times).totals()
        seconds, peak = (np.broadcast_to(v, grid.legal.shape) for v in found)
        return seconds, peak

    def options(self, forms: Forms, candidates: Candidates, where: Any) -> list[Option]:
        """Some of the candidates of a family, by flat index, in full."""
        chosen = candidates.take(where)
        priced = steps(forms, self.hardware, chosen, self.regime)
        return [option_of(forms, chosen, priced, i) for i in range(len(where))]


def option_of(forms: Forms, c: Candidates, s: Steps, i: int) -> Option:
    """One row of priced columns."""
    sizes = {a: int(c.sizes[a][i]) for a in ORDER}
    context = "" if sizes["cp"] == 1 else "ulysses" if c.ulysses[i] else "ring"
    return Option(
        sizes, c.order, forms.family.sequence, int(c.rows[i]), int(c.microbatches[i]), int(c.zero[i]),
        int(c.shard[i]), POLICIES[int(c.recompute[i])], SCHEDULES[int(c.schedule[i])], int(c.virtual[i]),
        bool(c.offload[i]), context, float(s.seconds[i]), float(s.compute[i]), float(s.bubble[i]),
        float(s.optimizer[i]), {a: float(v[i]) for a, v in s.exposed.items() if v[i] > 0},
        {k: float(v[i]) for k, v in s.memory.items()}, float(s.flops[i]), float(s.host[i]),
    )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        question: what was asked. count: candidates priced.
        ranked: the fastest that fit, fastest first; ties by a rank's work, by memory, then by the order of fields.
        front: nothing that fits is both faster and smaller, fastest first.
        least: where nothing fits, the one of each grid that is nearest to it, nearest first.
    """

    question: Question
    count: int = 1
    ranked: tuple[Option, ...] = ()
    front: tuple[Option, ...] = ()
    least: tuple[Option, ...] = ()

    @property
    def limit(self) -> float:
        """Bytes that a rank may hold."""
        return self.question.limit


@dataclass
class _Kept:
    """Places in grids with their price: (seconds, bytes, grid, flat index)."""

    question: Question
    grids: list[tuple[Forms, Grid]] = field(default_factory=list)
    count: int = 0
    rows: dict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))

    def add(self, forms: Forms, grid: Grid) -> None:
        """Price a grid and keep what may be among the best of all."""
        q = self.question
        legal = np.flatnonzero(grid.legal)
        seconds, peak = (v.reshape(-1)[legal] for v in q.totals(forms, grid))
        self.count += len(legal)
        filled = q.filled(peak, q.hosted(forms, grid)[legal])
        inside = np.flatnonzero(filled <= 1)
        chosen = {
            "best": inside,
            "front": inside[_front(seconds[inside], peak[inside])],
            "least": np.argmin(filled, keepdims=True),
        }
        if len(inside) > KEEP:
            last = np.partition(seconds[inside], KEEP)[KEEP]
            chosen["best"] = inside[seconds[inside] <= last]
        for name, at in chosen.items():
            self.rows[name].append(np.stack([seconds[at], peak[at], np.full(len(at), len(self.grids)), legal[at]]))
        self.grids.append((forms, grid))

    def found(self) -> Found:
        """What is best of all that was added."""
        if not self.grids:
            return Found(self.question, 0)
        best, front, least = (np.concatenate(self.rows[n], axis=1) for n in ("best", "front", "least"))
        best = best[:, np.lexsort((best[1], best[0]))][:, : 4 * KEEP]
        front = front[:, _front(front[0], front[1])]
        ranked = sorted(self._options(best), key=lambda o: (*o.rank, o.key()))
        small = [] if ranked else sorted(self._options(least), key=self.question.smallest)
        return Found(self.question, self.count, tuple(ranked), _unbeaten(self._options(front)), tuple(small))

    def _options(self, rows: Array) -> list[Option]:
        out: list[Option] = []
        for at in np.unique(rows[2]):
            forms, grid = self.grids[int(at)]
            out += self.question.options(forms, grid.candidates, rows[3][rows[2] == at].astype(int))
        return out


def search(forms: Iterable[Forms], hardware: Hardware, space: Space, regime: Regime, limit: float) -> Found:
    """Price every candidate; where nothing fits, those with states in host memory too."""
    question = Question(tuple(forms), hardware, space, regime, limit)
    found = _search(question)
    if not found.ranked and not space.offload and "offload" not in dict(space.given):
        more = _search(replace(question, space=replace(space, offload=True)))
        least = tuple(sorted((*found.least, *more.least), key=question.smallest))
        found = replace(more, count=found.count + more.count, least=least)
    return found


def _search(question: Question) -> Found:
    kept = _Kept(question)
    for forms, grid in every_grid(question):
        kept.add(forms, grid)
    return kept.found()


def every_grid(question: Question) -> Iterator[tuple[Forms, Grid]]:
    """All candidates of all families."""
    for forms in question.forms:
        for grid in grids(question.space, forms.family):
            yield forms, grid


def _front(seconds: Array, peak: Array) -> Any:
    """Indices of the Pareto front, fastest first."""
    order = np.lexsort((peak, seconds))
    if not len(order):
        return order
    lowest = np.minimum.accumulate(peak[order])
    return order[np.r_[True, peak[order][1:] < lowest[:-1]]]


def _unbeaten(options: Sequence[Option]) -> tuple[Option, ...]:
    out: list[Option] = []
    for option in sorted(options, key=lambda o: (round(o.seconds, 9), o.peak, o.key())):
        if not out or option.peak < out[-1].peak:
            out.append(option)
    return tuple(out)
