"""Plans lowered for real: each by the passes, on the program at its own sizes, and priced by that program.

A search prices layouts that suit an example of some rows and positions on two tensor ranks. Here a plan gets the
program that a run of it would have on its first rank, checks included. Nothing of the model is allocated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from autopar.compile import only_loss, trace_in
from autopar.cost.exact import exact
from autopar.cost.forms import Forms
from autopar.errors import AutoparError
from autopar.families import Example, Sample
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.base import Context
from autopar.passes.planned import Planned
from autopar.passes.planned import plan as run_passes
from autopar.plans import Plan
from autopar.ranking import priced_on
from autopar.resized import Resize
from autopar.runtime.garbage import uncollected
from autopar.solve.batch import settle_outputs
from autopar.strategy import Strategy
from autopar.trace.blueprint import blueprint

Kind = tuple[bool, bool]  # whether the mesh has ep, and cp: what a trace depends on besides the rows


@dataclass
class Lowering:
    """Lowers plans of one model; what is traced for one serves the others.

    The trace of the families serves those without context ranks, resized (``autopar.resized``). What cannot be lowered
    so is traced at its own sizes before it is refused.

    Args:
        model: as it is planned for; its structure, shapes and mode are read. args, kwargs: example inputs.
        precision: as ``Strategy.precision``. loss: as of ``plan``. sample: the trace of the families, if there is one.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    precision: str
    loss: Callable[[Any], Tensor] | None = None
    sample: Sample | None = None
    _traces: dict[Kind, Program] = field(default_factory=dict)
    _near: list[Program | None] = field(default_factory=list)

    def __call__(self, plan: Plan) -> Plan:
        """The plan with the price of its program. Raises AutoparError of a pass or a check, or a check."""
        with uncollected():
            lowered = self._lowered(plan)
        space, option = plan.found.question.space, plan.option
        positions = space.positions if space.positions > 1 else None
        made = exact(lowered.main, lowered.prologue, sequence=option.sequence, positions=positions)
        return priced_on(plan, Forms(made))

    def _lowered(self, plan: Plan) -> Planned:
        """The plan's programs; those of its first rank are made as well, which checks them."""
        mesh, near = Mesh.parse(plan.mesh), self._resized(plan)
        if near is not None and mesh.size("cp") == 1:
            try:
                return self._run(plan, mesh, near)
            except AutoparError:
                pass  # which the program of its own trace may not have
        return self._run(plan, mesh, self._traced(plan, mesh))

    def _run(self, plan: Plan, mesh: Mesh, whole: Program) -> Planned:
        """The passes on a trace of the global batch."""
        space, strategy = plan.found.question.space, replace(Strategy.of(plan.strategy), precision=self.precision)
        rows = (space.batch // mesh.data_size,) * mesh.data_size if whole.rows else ()
        whole = replace(whole, mesh=mesh, rows=rows)
        context, local = (Context(plan.hardware, strict=strategy.strict) for _ in range(2))
        found = run_passes(only_loss(whole), strategy, mesh, context, train=True, whole=whole)
        found.local(local, lambda m: m.coordinates(0))
        return found

    def _resized(self, plan: Plan) -> Program | None:
        if self.sample is None:
            return None
        if not self._near:
            space = plan.found.question.space
            self._near.append(Resize(self.sample.primes, space.batch, space.positions)(self.sample.program))
        return self._near[0]

    def _traced(self, plan: Plan, mesh: Mesh) -> Program:
        """The trace of the global batch."""
        space = plan.found.question.space
        rows = (space.batch // mesh.data_size,) * mesh.data_size
        kind = mesh.size("ep") > 1, mesh.size("cp") > 1
        if kind not in self._traces:
            held = any(True for _ in (*self.model.parameters(), *self.model.buffers()))
            device = "meta" if held else None  # a trace is on the device of what the model holds
            args, kwargs = Example.of(self.args, self.kwargs).shaped(rows[0], space.positions, device)
            traced = trace_in(
                self.precision, blueprint(self.model), args, kwargs,
                mesh=mesh, rows=rows, loss=self.loss, train=self.model.training,
            )  # fmt: skip
            self._traces[kind] = settle_outputs(traced.program)
        return self._traces[kind]
