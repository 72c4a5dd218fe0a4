"""Pass ``pipeline``: the outer graph in stages, one or more to a rank along ``pp``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.cost.balance import Balance, Unit, at_names, balance
from autopar.cost.schedule import Schedule, check_legal, default_schedule, default_stages
from autopar.cost.schedule import schedule as schedule_of
from autopar.cost.timeline import simulate
from autopar.errors import AutoparError
from autopar.ir.program import Form, Program, Stages
from autopar.ir.stages import parts_of
from autopar.passes.base import Context, Pass
from autopar.passes.units import Layer, held_bytes, layers_of, place_early, priced

SLACK = 1.25  # times the fastest step, given up so that parameters are shared out


@dataclass(frozen=True)
class PipelineParallel(Pass):
    """Stages of the model over ``pp``.

    Does:
        Cuts the layers, in the order in which they run, into equally long stages by their predicted time, or before the
        modules named in ``stages``. What reads no parameter and makes no more than it takes runs in the earliest stage
        that has its inputs, so that an auxiliary loss crosses as a number. Parameters live in the stages that read
        them.
    Requires:
        RESHARDED, where the program is still the same on every rank, so that all cut alike.
    Ensures:
        RESHARDED; ``Program.stages`` is set, staged nodes of the outer graph have ``stage``, parameters ``stages``.
    Communication:
        Each microbatch: the bytes of what crosses a cut, forward, and of its gradients, backward. Each step: 2Ψ bytes
        of a parameter that several ranks hold.
    Limits:
        At least as many layers as stages. A block is never cut.
    Sources:
        Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., arXiv:2104.04473; Qi et al., arXiv:2401.10241.
    """

    schedule: str = ""
    microbatches: int = 0
    virtual: int = 0
    stages: str = ""

    name: ClassVar[str] = "pipeline"
    requires: ClassVar[Form] = Form.RESHARDED
    produces: ClassVar[Form] = Form.RESHARDED

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        ranks = program.mesh.size("pp")
        if ranks == 1:
            if self.schedule or self.virtual or self.stages:
                raise AutoparError(
                    "no-pipeline",
                    f"{self}: mesh {program.mesh} has no stages",
                    "give the mesh a pp axis, or leave it out",
                )
            return program
        steps = self.microbatches or program.mesh.microbatches
        schedule, reason = self._schedule(ranks, steps)
        per_rank = self.virtual or default_stages(schedule)
        if self.microbatches:
            check_legal(schedule, ranks, per_rank, steps)
        count = ranks * per_rank
        layers = layers_of(program, count)
        if len(layers) < count:
            raise _too_few(layers, count, f"pp={ranks}" + (f" with {per_rank} to a rank" if per_rank > 1 else ""))
        units = priced(program, layers, context.hardware)
        held = held_bytes(program, set().union(*(layer.params for layer in layers)))
        cut = self._cut(units, layers, order(schedule, ranks, per_rank, steps), held, context)
        bounds = [*cut.starts, len(layers)]
        for stage, (first, end) in enumerate(zip(bounds, bounds[1:])):
            for node in (n for layer in layers[first:end] for n in layer.nodes):
                node.meta["stage"] = stage
        place_early(program)
        names = tuple(layers[s].name if s < len(layers) else "" for s in cut.starts)
        times = tuple(_seconds(cut.units_of(s)) for s in range(count))
        program.stages = Stages(names, cut.schedule.placement, schedule, steps, times, reason)
        _settle(program, context)
        return program

    def _schedule(self, ranks: int, microbatches: int) -> tuple[str, str]:
        if self.schedule:
            return self.schedule, ""
        if self.virtual > 1:
            return "interleaved", f"{self.virtual} stages to a rank"
        return default_schedule(ranks, microbatches)

    def _cut(self, units: list[Unit], layers: list[Layer], order: Schedule, held: float, context: Context) -> Balance:
        if context.stages:
            return Balance(tuple(units), order, tuple(_pinned(layers, order.stages, context)))
        if self.stages:
            return at_names(units, order, self.stages.split("+"))
        return even(units, order, context.hardware.memory_bytes, held)


def order(name: str, ranks: int, per_rank: int, microbatches: int) -> Schedule:
    """The schedule; that of enough microbatches for it where a program has too few, as one that is not trained has."""
    for steps in (microbatches, ranks * per_rank):
        try:
            return schedule_of(name, ranks, per_rank, steps)
        except AutoparError:
            if steps != microbatches:
                raise
    raise AssertionError(name)


def even(units: list[Unit], order: Schedule, limit: float, held: float) -> Balance:
    """The cut whose slowest stage is fastest; not one that leaves most of the model on one rank, if others do.

    What a rank may hold of the parameters is halfway between an even share and all of them.

    Args:
        limit: bytes of a rank's memory. held: bytes of all parameters, tied ones once.
    """
    try:
        best = balance(units, order, limit)
    except AutoparError:  # ZeRO may still make it fit
        best = balance(units, order)
    weights = [replace(u, states=u.parameters, activations=0.0) for u in units]
    share = held * (1 + 1 / order.ranks) / 2
    if max(Balance(tuple(weights), order, best.starts).bytes) <= share:
        return best
    try:
        found = Balance(tuple(units), order, balance(weights, order, share).starts)
    except AutoparError:  # a layer may be that large
        return best
    slower = simulate(order, found.times()).seconds / simulate(order, best.times()).seconds
    return found if slower <= SLACK else best


def _seconds(units: Sequence[Unit]) -> tuple[float, float, float]:
    return sum(u.forward for u in units), sum(u.input for u in units), sum(u.weight for u in units)


def _too_few(layers: list[Layer], count: int, why: str) -> AutoparError:
    names = ", ".join(u.name for u in layers)
    return AutoparError(
        "few-layers", f"{why} needs {count} stages, but the model can be cut into {len(layers)} layers only: {names}",
        f"use pp={len(layers)} or less, and fewer stages to a rank",
    )  # fmt: skip


def _pinned(layers: list[Layer], count: int, context: Context) -> list[int]:
    """The cut under which every parameter stays in the stages that hold it. Raises AutoparError ``stage-order``."""
    stages, at = [], 0
    for layer in layers:
        allowed = [s for s in range(at, count) if all(s in context.stages.get(p, (s,)) for p in layer.params)]
        if not allowed:
            held = {p: context.stages[p] for p in sorted(layer.params) if p in context.stages}
            why = f"{layer.name} runs after stage {at} in this call, but its parameters live in stages {held}"
            raise AutoparError("stage-order", why, "make the first call one of the same kind, or name the stages")
        at = allowed[0]
        stages.append(at)
    return [next((i for i, s in enumerate(stages) if s >= stage), len(layers)) for stage in range(count)]


def _settle(program: Program, context: Context) -> None:
    """Note in which stages each parameter lives. Raises AutoparError ``stage-order`` where that is decided already."""
    found: dict[str, set[int]] = {}
    for part in parts_of(program):
        for name in part.params:
            found.setdefault(name, set()).add(part.index)
    near: tuple[int, ...] = (0,)
    for name, param in program.params.items():
        if param.kind != "parameter":
            continue
        stages = context.stages.get(name) or tuple(sorted(found.get(name, near[-1:])))
        if not found.get(name, set()) <= set(stages):
            why = f"{name} is read in stages {sorted(found[name])} by this call, but lives in {list(stages)}"
            raise AutoparError("stage-order", why, "make the first call one of the same kind, or name the stages")
        near = stages
        program.params[name] = replace(param, stages=stages)
