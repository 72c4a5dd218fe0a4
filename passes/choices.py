"""The passes that a strategy stands for on a mesh, and what it leaves open."""

from dataclasses import replace

from autopar.cost.schedule import MOST, most_microbatches, runs
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.base import Pass
from autopar.passes.pipeline import parse
from autopar.passes.pipeline_parallel import PipelineParallel
from autopar.strategy import Strategy


def passes_of(strategy: Strategy, mesh: Mesh, microbatches: int) -> tuple[Pass, ...]:
    """The strategy's passes on a mesh; ``microbatches`` of a step, where the text does not say.

    Raises AutoparError ``no-pipeline`` where the user's own text leaves out the stages that the mesh has.
    """
    found = parse(strategy.pipeline_on(mesh.size("pp") > 1))
    if mesh.size("pp") > 1 and not any(isinstance(p, PipelineParallel) for p in found):
        why = f"mesh {mesh} has a pp axis, the passes have no pipeline"
        raise AutoparError("no-pipeline", why, "put pipeline between reshard and localize")
    return tuple(
        replace(p, microbatches=p.microbatches or microbatches) if isinstance(p, PipelineParallel) else p for p in found
    )


def microbatches_of(strategy: Strategy, program: Program) -> tuple[int, tuple[str, ...]]:
    """How many microbatches a step has, and a note that says why where the user did not choose."""
    ranks, rows = program.mesh.size("pp"), program.rows
    most = strategy.microbatch_rows
    if strategy.microbatches is not None or (ranks == 1 and most is None):
        return strategy.microbatches or 1, ()
    if not rows or len(set(rows)) > 1:
        return 1, (f"1 microbatch: the rows of the data ranks differ, {rows}" if rows else "1 microbatch: no rows",)
    name, virtual = _schedule(strategy)
    if most is not None:
        small = [n for n in range(1, rows[0] + 1) if rows[0] % n == 0 and rows[0] // n <= most]
        count = next((n for n in small if ranks == 1 or runs(name, ranks, virtual, n)), small[0])
        return count, (f"{count} microbatches: {rows[0]} rows in parts of at most {most}",)
    count, free = most_microbatches(name, ranks, virtual, rows[0])
    which = "divide" if free else "the schedule can run and that divide"
    why = f"{count} microbatches: the most that {which} {rows[0]} rows, up to {MOST} for each of {ranks} ranks"
    return count, (why,)


def _schedule(strategy: Strategy) -> tuple[str, int]:
    """The schedule that the user named, if any, and stages a rank; 0 for the schedule's own."""
    given = next((p for p in parse(strategy.pipeline_on(True)) if isinstance(p, PipelineParallel)), PipelineParallel())
    return given.schedule or ("interleaved" if given.virtual > 1 else ""), given.virtual
