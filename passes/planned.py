"""A program for one way of calling a model: planned alike on all ranks, then lowered for each."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.ir.layout import Layout
from autopar.ir.mesh import TIME, Mesh
from autopar.ir.program import Program
from autopar.passes.base import Context, Pass
from autopar.passes.choices import microbatches_of, passes_of
from autopar.passes.microbatch import microbatch
from autopar.passes.pipeline import Record, run
from autopar.passes.zero import Zero
from autopar.strategy import Strategy

EARLY = "data-parallel,expert-parallel,reshard"  # of a prologue, which reads no parameter
Coordinates = Callable[[Mesh], Mapping[str, int]]


@dataclass(frozen=True)
class Planned:
    """Programs before ``localize``, equal on all ranks.

    Args:
        main: of a call, or of each microbatch of a training step.
        prologue: what a step in microbatches computes once, from all rows.
        rest: the passes that are left for ``main``.
    """

    main: Program
    prologue: Program | None
    rest: tuple[Pass, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """All of them, in the order in which they run."""
        return (self.main,) if self.prologue is None else (self.prologue, self.main)

    @property
    def layouts(self) -> dict[str, Layout]:
        """What each parameter and buffer is on the axes of the mesh."""
        spread = {n: p.layout for n, p in self.main.params.items() if p.layout is not None and p.kind != "constant"}
        held = {full: Layout(tuple(t for t in full.types if t[0] != TIME)) for full in set(spread.values())}
        return {name: held[full] for name, full in spread.items()}

    def local(
        self, context: Context, at: Coordinates, records: list[Record] | None = None
    ) -> tuple[Program, Program | None]:
        """The main program and the prologue of one rank, whose coordinates on a mesh ``at`` gives."""
        before = None
        if self.prologue is not None:
            before = run(self.prologue, "localize", Context(context.hardware, at=at(self.prologue.mesh)))
        context.at = at(self.main.mesh)
        return run(self.main, self.rest, context, records=records), before


def plan(
    program: Program, strategy: Strategy, mesh: Mesh, context: Context, *, train: bool, exact: bool = False,
    records: list[Record] | None = None, whole: Program | None = None, own: bool = False,
) -> Planned:  # fmt: skip
    """Run the strategy's passes up to ``localize`` on a trace.

    Args:
        train: whether it is a training step, which may run in microbatches: as many as the user chose, or one, where
            the user chose none and they are coupled.
        exact: compute in the parameters' own dtypes, whatever the precision of the strategy.
        whole: the trace with all outputs. Where they read more than the loss does, stages are those of a call.
        own: nobody else has the trace, so that it may be changed in place.
    """
    if whole is not None and mesh.size("pp") > 1 and not context.stages and _reads(whole) != _reads(program):
        call = _planned(whole, strategy, mesh, Context(context.hardware, strict=context.strict), 0, exact, None)
        context.stages = {n: p.stages for n, p in call.main.params.items() if p.stages}
    if not train:
        return _planned(program, strategy, mesh, context, 0, exact, records, own)
    steps, notes = microbatches_of(strategy, program)
    try:
        return _planned(_noted(program, notes), strategy, mesh, context, steps, exact, records, own)
    except AutoparError as error:
        if error.slug != "batch-coupled-loss" or strategy.microbatches is not None:
            raise
        program = _noted(program, (f"1 microbatch: {error.message}",))
        return _planned(program, strategy, mesh, context, 1, exact, records, own and steps > 1)


def _planned(
    program: Program, strategy: Strategy, mesh: Mesh, context: Context, steps: int, exact: bool,
    records: list[Record] | None, own: bool = False,
) -> Planned:  # fmt: skip
    prologue = None
    if steps > 1:
        split = microbatch(program, steps, context)
        program, prologue, own = split.main, split.prologue, False
    before = None if prologue is None else run(prologue, EARLY, Context(context.hardware))
    passes = passes_of(strategy, mesh, steps)
    if exact:
        passes = tuple(replace(p, precision="fp32") if isinstance(p, Zero) else p for p in passes)
    local = next((i for i, p in enumerate(passes) if p.name == "localize"), len(passes))
    return Planned(run(program, passes[:local], context, records=records, own=own), before, passes[local:])


def _reads(program: Program) -> dict[str, int]:
    """How often the outer graph reads each parameter."""
    return dict(Counter(name for _, names in program.readers() for name in names))


def _noted(program: Program, notes: tuple[str, ...]) -> Program:
    return replace(program, notes=(*program.notes, *notes))
