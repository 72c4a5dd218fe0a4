"""strategy="auto": mesh and strategy by the cost model, for the processes that there are."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError
from autopar.families import Example
from autopar.ir.mesh import Mesh
from autopar.planner import accelerator, given, plan
from autopar.plans import Plan
from autopar.runtime.agreement import everyones, of_the_first
from autopar.strategy import Strategy

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
WORD = "auto"
SHOWN = 24  # plans that ``explain`` lists


@dataclass(frozen=True)
class Decision:
    """What was chosen and why.

    Args:
        mesh: axes and sizes as text. strategy: fields of Strategy as text. rows: of the global batch that it is for.
        summary: one line. text: the plan in full, with the plans that come next and those that could not be compiled.
    """

    mesh: str
    strategy: str
    rows: int
    summary: str
    text: str

    def explain(self) -> str:
        """The step by its parts, the memory by kind, why each neighbour is worse, and what was passed over."""
        return self.text


def wants(strategy: Any) -> bool:
    """Whether a strategy is ``auto``, or text that begins with it: ``auto,zero=3``."""
    return isinstance(strategy, str) and strategy.split(",")[0].strip() == WORD


def decide(
    model: nn.Module,
    ranks: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    strategy: str = WORD,
    *,
    mesh: Mapping[str, int] | None = None,
    rows: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    hardware: str = "cpu",
) -> Decision:
    """The fastest plan that fits and can be lowered, on ``ranks`` devices, by the price of its program.

    Args:
        args, kwargs: example inputs of any number of rows. strategy: ``auto``, and fields that are decided already.
        mesh: sizes of axes that are decided, in order. rows: of the global batch; the example's for each device where
            None. hardware: profile of the devices.

    Raises AutoparError ``nothing-fits``, ``nothing-compiles``.
    """
    example = Example.of(args, kwargs)
    batch = rows or example.rows * ranks
    own = given(strategy.partition(",")[2])
    hardware = own.get("hardware", hardware)
    plans = plan(
        model, f"{hardware}x{ranks}", args, kwargs, batch=batch, loss=loss, precision=own.get("precision", "fp32"),
        count=SHOWN, mesh=mesh, strategy=strategy.partition(",")[2],
    )  # fmt: skip
    if not plans:
        if plans.dropped:
            raise AutoparError("nothing-compiles", plans.hint, "give a mesh")
        raise AutoparError("nothing-fits", plans.hint, "more devices, fewer rows or shorter ones")
    found = plans[0]
    summary = "; ".join((_summary(found, batch), *plans.notes))
    return Decision(found.mesh, str(settings(found, own, hardware)), batch, summary, f"{found.explain()}\n{plans}\n")


def settings(found: Plan, own: Mapping[str, Any], hardware: str) -> Strategy:
    """The plan as a Strategy for any number of rows: microbatches by their rows, usual schedules left to them.

    ``own``: the fields that are decided, which it has as they are.
    """
    chosen = Strategy.of(found.strategy)
    several = found.option.microbatches > 1 or found.option.sizes["pp"] > 1
    counted = "microbatches" in own or not several
    made: dict[str, Any] = {
        "microbatches": None, "microbatch_rows": None if counted else found.option.rows,
        "schedule": None if chosen.schedule in ("1f1b", "gpipe") else chosen.schedule, "hardware": hardware,
    }  # fmt: skip
    return replace(chosen, **{**made, **own})


def _summary(found: Plan, batch: int) -> str:
    price = f"predicted {found.seconds * 1e3:.3g} ms a step of {batch} rows, {found.memory / 2**30:.3g} GiB"
    return f"{found.words}: {price}"


def decided(
    model: nn.Module,
    mesh: DeviceMesh | str | Mapping[str, int] | int | None,
    example: Inputs | None,
    strategy: str,
    loss: Callable[[Any], Tensor] | None,
) -> tuple[Decision, Inputs]:
    """What the first process decides, and the example inputs with a data rank's share of the rows that it is for.

    Collective over all processes; an error of the first is raised on every one.
    """
    if example is None:
        raise AutoparError("input-structure", 'strategy="auto" without example inputs', "give args= or kwargs=")
    rows = everyones(Example.of(*example).rows)
    fixed = sizes_of(mesh, len(rows))
    whole = bool(fixed) and Mesh.of(fixed).world == len(rows)
    batch = rows[0] * Mesh.of(fixed).data_size if whole else sum(rows)

    made = everywhere(model, len(rows), example, strategy, fixed, batch, loss)
    return made, Example.of(*example).with_rows(batch // Mesh.parse(made.mesh).data_size)


def everywhere(
    model: nn.Module, ranks: int, example: Inputs, strategy: str, fixed: Mapping[str, int], rows: int,
    loss: Callable[[Any], Tensor] | None = None,
) -> Decision:  # fmt: skip
    """What the first process decides for this machine's devices, on all of them, and says on stderr. Collective."""

    def choose() -> Decision:
        made = decide(model, ranks, *example, strategy, mesh=fixed, rows=rows, loss=loss, hardware=accelerator())
        print(f"autopar: {made.summary}", file=sys.stderr)
        return made

    return of_the_first(choose)


def sizes_of(mesh: DeviceMesh | str | Mapping[str, int] | int | None, world: int) -> dict[str, int]:
    """The axes that are decided by what a user gives for ``auto``. Raises AutoparError ``bad-mesh``."""
    fixed: dict[str, int] = {}
    count = world
    if isinstance(mesh, DeviceMesh):
        count = mesh.size()
        if mesh.ndim > 1:
            fixed = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape))
    elif isinstance(mesh, int):
        count = mesh
    elif mesh is not None:
        fixed = dict((Mesh.of(mesh) if isinstance(mesh, Mapping) else Mesh.parse(mesh)).axes)
    if count != world:
        why = f'strategy="auto" on {count} devices of {world} processes'
        raise AutoparError("bad-mesh", why, "give all processes, or a mesh and a strategy")
    return fixed
