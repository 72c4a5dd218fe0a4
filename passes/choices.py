"""The passes that a strategy stands for on a mesh, and what it leaves open."""

from dataclasses import replace

from autopar.cost.schedule import check_legal, default_stages
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.base import Pass
from autopar.passes.pipeline import parse
from autopar.passes.pipeline_parallel import PipelineParallel
from autopar.strategy import Strategy

MOST = 4  # microbatches for each rank of a pipeline: its ranks are then idle for less than a fifth of a step


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
    counts = [n for n in range(1, rows[0] + 1) if rows[0] % n == 0]
    if most is not None:
        small = [n for n in counts if rows[0] // n <= most]
        count = next((n for n in small if ranks == 1 or _runs(strategy, ranks, n)), small[0])
        return count, (f"{count} microbatches: {rows[0]} rows in parts of at most {most}",)
    counts = [n for n in counts if n <= MOST * ranks]
    able = [n for n in counts if _runs(strategy, ranks, n)]
    count = max(able or counts)
    which = "divide" if len(able) in (0, len(counts)) else "the schedule can run and that divide"
    why = f"{count} microbatches: the most that {which} {rows[0]} rows, up to {MOST} for each of {ranks} ranks"
    return count, (why,)


def _runs(strategy: Strategy, ranks: int, microbatches: int) -> bool:
    """Whether the schedule that the user named, if any, runs so many microbatches."""
    given = next((p for p in parse(strategy.pipeline_on(True)) if isinstance(p, PipelineParallel)), PipelineParallel())
    name = given.schedule or ("interleaved" if given.virtual > 1 else "")
    try:
        if name:
            check_legal(name, ranks, given.virtual or default_stages(name), microbatches)
    except AutoparError:
        return False
    return True
