"""A step of a program in stages, as it is predicted to run."""

from autopar.cost.hardware import Hardware
from autopar.cost.schedule import schedule
from autopar.cost.timeline import Timeline, Times, simulate
from autopar.cost.units import send_seconds
from autopar.ir.program import Program
from autopar.ir.stages import crossings


def step_of(program: Program, hardware: Hardware) -> Timeline:
    """The program's schedule in time, from the predicted seconds of its stages and of what crosses its cuts."""
    stages = program.stages
    assert stages is not None
    ranks = program.mesh.size("pp")
    order = schedule(stages.schedule, ranks, len(stages.ranks) // ranks, stages.microbatches)
    sends = []
    for values in crossings(program):
        sizes = sum(v.spec.bytes for v in values), sum(v.spec.bytes for v in values if v.grad)
        sends.append(tuple(send_seconds(n, hardware, program.mesh) if n else 0.0 for n in sizes))
    forward, inputs, weights = zip(*stages.seconds)
    return simulate(order, Times(forward, inputs, weights, tuple(sends)))  # type: ignore[arg-type]
