"""What a search found, for people: ranked plans, why each neighbour is worse, what is over where nothing fits."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from autopar.cost.hardware import Hardware
from autopar.cost.neighbours import neighbours
from autopar.cost.search import Found, Option
from autopar.cost.table import duration, size

if TYPE_CHECKING:
    from autopar.cost.forms import Forms
    from autopar.cost.rehearsal import Rehearsal

PRICED = (
    "sequence_parallel", "context_parallel", "zero", "zero_shard_size", "microbatches", "microbatch_rows", "schedule",
    "virtual_stages", "recompute", "offload", "hardware", "precision",
)  # fmt: skip
"""Fields of Strategy that an option has by itself, or that its cluster says."""
MOST = 100_000  # actions of a step that are simulated


@dataclass(frozen=True)
class Plan:
    """A strategy with its predicted cost.

    Args:
        option: degrees, engine and price. hardware: that it is for. tokens: of a step (rows where there are no
            positions). found: the search that it came from.
        program: closed forms of its own program, where it was lowered and ``option`` has the price of that.
        searched: then the option as the search priced it.
    """

    option: Option
    hardware: Hardware = field(repr=False)
    tokens: int
    found: Found = field(repr=False)
    program: "Forms | None" = field(default=None, repr=False)
    searched: Option | None = field(default=None, repr=False)

    @property
    def mesh(self) -> str:
        """Axes and sizes, major to minor: ``dp=8,tp=8``."""
        return self.option.mesh

    @property
    def strategy(self) -> str:
        """Fields of ``Strategy``, as text; also those that were decided and have no price."""
        own = (f"{k}={v}" for k, v in self.found.question.space.given if k not in PRICED)
        return ",".join(filter(None, (self.option.strategy, *own)))

    @property
    def priced_by(self) -> str:
        """``program``: its own, lowered by the passes; ``closed forms``: those of the search."""
        return "closed forms" if self.program is None else "program"

    @property
    def words(self) -> str:
        """Mesh and strategy, in one line."""
        return f"{self.mesh} {self.strategy}".strip()

    @property
    def fits(self) -> bool:
        """Whether every rank holds no more than it may, on its device and in host memory."""
        return self.found.question.fits(self.option)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.option.seconds

    @property
    def memory(self) -> float:
        """Predicted bytes of the fullest rank."""
        return self.option.peak

    @property
    def ranks(self) -> int:
        """Devices."""
        return int(np.prod(list(self.option.sizes.values())))

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.tokens / self.seconds / self.ranks

    @property
    def mfu(self) -> float:
        """Model flops over what all devices could do meanwhile in bfloat16."""
        return self.option.flops / (self.seconds * self.ranks * self.hardware.flops_per_second("bfloat16"))

    def neighbours(self) -> list[tuple[str, Option]]:
        """For each single change (one field, or one factor of two moved between two axes) the best such option."""
        return neighbours(self.option, self.found.question)

    def why(self, other: Option) -> str:
        """Why another option of the search is worse: what is over, or which parts of the step are longer."""
        own = self.searched or self.option
        if not replace(self, option=other).fits:
            return f"does not fit: {self.found.question.over(other)}"
        longer = {name: b - a for name, a, b in _parts(own, other) if b - a > 1e-3 * own.seconds}
        top = sorted(longer, key=lambda name: (-longer[name], name))[:2]
        slower = other.seconds / own.seconds - 1
        if slower < 5e-4:
            if other.compute > 1.001 * own.compute:
                return f"as fast, {duration(other.compute - own.compute)} more work, which is hidden"
            more = other.peak - own.peak
            return f"as fast, {size(more)} more memory" if more > 0 else "as fast"
        return f"{slower:+.1%}: " + ", ".join(f"{name} +{duration(longer[name])}" for name in top)

    def explain(self) -> str:
        """The step by its parts, memory by kind, why each neighbour is worse, and closed forms with their values."""
        console = Console(width=120, record=True, file=io.StringIO(), highlight=False)
        for grid in self.tables():
            console.print(grid)
        return console.export_text()

    def tables(self) -> Iterator[Grid]:
        """What ``explain`` prints."""
        o = self.option
        yield _two(
            f"{o.mesh}  {o.strategy}", ("part of the step", "time", "share"),
            [(n, duration(v), f"{v / o.seconds:.1%}") for n, v in _step(o)] + [("step", duration(o.seconds), "")],
        )  # fmt: skip
        yield _two(
            "memory of the fullest rank", ("kind", "bytes", "share"),
            [(k, size(v), f"{v / o.peak:.1%}") for k, v in o.memory.items() if v]
            + [("peak", size(o.peak), f"of {size(self.found.limit)}")]
            + [("in host memory", size(o.host), f"of {size(self.found.question.host_limit)}")] * bool(o.host),
        )  # fmt: skip
        rows = [(change, n.mesh, n.strategy, self.why(n)) for change, n in self.neighbours()]
        yield _two("neighbours: the best with one change", ("change", "mesh", "strategy", "why worse"), rows)
        yield from self._formulas()

    def _formulas(self) -> Iterator[Grid]:
        """The closed forms of which the plan's numbers are made, with their values."""
        from autopar.cost.formulas import formulas  # which loads symbols

        o, positions = self.option, self.found.question.space.positions
        yield from formulas(_forms(self).family, {**o.sizes, "b": o.rows, "s": positions / o.sizes["cp"]})


def _forms(plan: Plan) -> "Forms":
    """The closed forms that a plan was found by."""
    forms = plan.found.question.forms
    return next((f for f in forms if f.family.sequence == plan.option.sequence), forms[0])


def rehearsed(plan: Plan) -> "Rehearsal | None":
    """A plan's step in time and memory, by its own program where it has one; None for more than ``MOST`` actions."""
    from autopar.cost.rehearsal import rehearse  # which a search does without, and the symbols that it loads

    option, question = plan.option, plan.found.question
    if option.sizes["pp"] * option.virtual * option.microbatches > MOST:
        return None
    return rehearse(plan.program or _forms(plan), plan.hardware, option, question.regime, question.space.positions)


def closer(plan: Plan, found: "Rehearsal | None") -> Plan:
    """The plan with the seconds and bytes of its rehearsal."""
    return plan if found is None else replace(plan, option=found.option)


def first_of(plans: Sequence[Plan]) -> int:
    """The index of the fastest that fits, else of the fastest."""
    return min(range(len(plans)), key=lambda i: (not plans[i].fits, plans[i].seconds))


@dataclass(frozen=True)
class Plans(Sequence[Plan]):
    """Plans that fit, fastest first; none where nothing fits. First those that were lowered, by their programs.

    Args:
        hint: where nothing fits: what is over by how much, and the smallest change that fits.
        notes: what was left out of the search, and why. dropped: plans whose program cannot be lowered, and why.
    """

    plans: tuple[Plan, ...]
    front: tuple[Plan, ...]
    found: Found
    hint: str = ""
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def said(self) -> tuple[str, ...]:
        """What to know beside the list: what was left out, what fell out, and which plans were lowered."""
        over = (f"passed over, as it cannot be lowered: {line}" for line in self.dropped)
        first = "the first was" if self.lowered == 1 else f"the first {self.lowered} were"
        done = f"{first} lowered, and ranked by the price of their own programs"
        return (*self.notes, *over, *([done] if self.lowered else ()))

    @property
    def lowered(self) -> int:
        """How many of the first plans have the price of their own program."""
        return sum(p.program is not None for p in self.plans)

    def __getitem__(self, index: Any) -> Any:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __str__(self) -> str:
        console = Console(width=160, record=True, file=io.StringIO(), highlight=False)
        console.print(self.table() if self.plans else self.hint)
        for note in self.said if self.plans else ():
            console.print(note)
        return console.export_text()

    def table(self, front: bool = False) -> Grid:
        """The ranked plans, or the Pareto front of time and memory."""
        shown = self.front if front else self.plans
        title = "nothing that fits is both faster and smaller" if front else "fastest plans that fit"
        columns = ["", "mesh", "strategy", "step", "tokens/s/device", "MFU", "exposed", "bubble", "memory"]
        rows = [
            [str(i), p.mesh, p.strategy, duration(p.seconds), f"{p.tokens_per_second:,.0f}", f"{p.mfu:.1%}",
             " ".join(f"{a} {duration(s)}" for a, s in p.option.exposed.items()) or "none",
             duration(p.option.bubble), size(p.memory)]
            for i, p in enumerate(shown, 1)
        ]  # fmt: skip
        if not front and self.lowered:
            columns.append("priced by")
            for p, row in zip(shown, rows):
                row.append(p.priced_by)
        return _two(f"{title} (of {self.found.count:,} candidates)", columns, rows)


def _two(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Grid:
    grid = Grid(title=title, title_justify="left", title_style="bold", header_style="bold cyan")
    for name in columns:
        grid.add_column(
            name, justify="left" if name in ("mesh", "strategy", "change", "why worse", columns[0]) else "right"
        )
    for row in rows:
        grid.add_row(*row)
    return grid


def _step(option: Option) -> list[tuple[str, float]]:
    exposed = [(f"{axis} communication", seconds) for axis, seconds in option.exposed.items()]
    return [("compute", option.compute), *exposed, ("bubble", option.bubble), ("optimizer", option.optimizer)]


def _parts(a: Option, b: Option) -> Iterator[tuple[str, float, float]]:
    left, right = dict(_step(a)), dict(_step(b))
    for name in dict.fromkeys((*left, *right)):
        yield name, left.get(name, 0.0), right.get(name, 0.0)
