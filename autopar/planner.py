"""plan: the strategies for a model on a cluster, ranked by predicted time, within memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cost import hardware as profiles
from autopar.cost.candidates import SCHEDULES
from autopar.cost.forms import Forms
from autopar.cost.regime import Regime, ours
from autopar.cost.space import ENGINES
from autopar.errors import AutoparError
from autopar.families import Example, families
from autopar.ir.mesh import KNOWN_AXES, Mesh
from autopar.passes.pipeline import parse
from autopar.plans import Plan, Plans
from autopar.ranking import cluster_of, planned, priced, space_of
from autopar.runtime.garbage import uncollected
from autopar.strategy import Strategy, written


@uncollected()
def plan(
    model: nn.Module,
    cluster: str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    precision: str | None = None,
    axes: tuple[str, ...] = KNOWN_AXES,
    mesh: Mapping[str, int] | str | None = None,
    strategy: Strategy | str | None = None,
    count: int = 10,
) -> Plans:
    """The fastest strategies that fit, best first. Allocates no model: it may lie on the meta device.

    Args:
        cluster: hardware and devices, as ``h100x64``.
        args, kwargs: example inputs; their rows and positions do not matter where ``batch`` and ``sequence`` are given.
        batch: rows of the global batch; by default four for each device. sequence: positions of a row.
        precision: as ``Strategy.precision``; bf16 where neither it nor ``strategy`` says. axes: mesh axes that may have
            several ranks. count: plans to return.
        mesh: axes whose sizes are decided, as ``tp=8``; the others are chosen. strategy: fields that are decided: those
            that text names, ``zero=0`` too, or those of a Strategy that are not at their default.

    Raises AutoparError ``unknown-hardware``, ``bad-cluster``, ``bad-strategy``, ``input-structure``, and what tracing
    raises.
    """
    machine = cluster_of(cluster)
    own = given(strategy)
    precision = _agreed("precision", precision, own.get("precision"), "bf16")
    _agreed("hardware", machine.name, own.get("hardware"), "")
    example = Example.of(args, kwargs or {})
    made = families(model, args, kwargs or {}, hardware=machine, loss=loss, precision=precision)
    positions = sequence or example.positions or 1
    fixed = _fixed(mesh, machine.ranks)
    space = space_of(machine, batch, positions, axes, fixed, tuple(own.items()))
    return planned([Forms(f) for f in made.values()], machine, space, regime_of(model, precision), count)


@uncollected()
def compare(
    model: nn.Module,
    cluster: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    strategies: Sequence[tuple[str, str, Mapping[str, Any]]],
    *,
    batch: int,
    sequence: int | None = None,
    precision: str = "bf16",
) -> list[tuple[str, Plan]]:
    """The price of (name, mesh, fields of Strategy) each, in the order given; mesh ``auto``: what ``plan`` chooses.

    Raises AutoparError where a strategy does not divide the model or the batch.
    """
    machine = profiles.load(cluster)
    made = [Forms(f) for f in families(model, args, kwargs, hardware=machine, precision=precision).values()]
    positions = sequence or Example.of(args, kwargs).positions or 1
    return priced(made, machine, strategies, batch, positions, regime_of(model, precision))


def _fixed(mesh: Mapping[str, int] | str | None, ranks: int) -> tuple[tuple[str, int], ...]:
    """The axes that are decided. Raises AutoparError ``bad-mesh`` where they do not divide the devices."""
    sizes = Mesh.parse(mesh) if isinstance(mesh, str) else Mesh.of(mesh or {})
    if ranks % sizes.world:
        raise AutoparError("bad-mesh", f"mesh {sizes} does not divide {ranks} devices", "axes whose product divides it")
    return sizes.axes


def given(strategy: Strategy | str | None) -> dict[str, Any]:
    """The fields of a strategy that a search keeps: those that text names, or that are not at their default.

    Raises AutoparError ``bad-strategy`` for what no plan can have.
    """
    if isinstance(strategy, Strategy):
        own = {f.name: getattr(strategy, f.name) for f in fields(Strategy) if getattr(strategy, f.name) != f.default}
    else:
        own = written(strategy or "")
    if own.get("context_parallel") == "auto":
        del own["context_parallel"]
    for name in ("stages", "passes"):
        if name in own:
            raise AutoparError("bad-strategy", f"{name} of a plan cannot be given", f"leave out {name}, or do not plan")
    chosen = Strategy(**own)
    wrong = chosen.context_parallel not in (None, "ring", "ulysses")
    if wrong or (chosen.schedule or "1f1b") not in SCHEDULES:
        known = f"context_parallel: ring, ulysses; schedule: {', '.join(SCHEDULES)}"
        raise AutoparError("bad-strategy", f"{chosen} has no price", known)
    sharded = "zero" not in own and any(own.get(name) for name in ENGINES)
    parse((replace(chosen, zero=3) if sharded else chosen).pipeline)  # which refuses values that no pass takes
    return own


def _agreed(name: str, one: str | None, other: str | None, default: str) -> str:
    """What two places say of a field. Raises AutoparError ``bad-strategy`` where they differ."""
    if one is not None and other is not None and one != other:
        raise AutoparError("bad-strategy", f"{name}={other} in the strategy, {one} for the plan", f"write {name} once")
    return one or other or default


def regime_of(model: nn.Module, precision: str) -> Regime:
    """How the engine holds a model's states: parameters, gradients and both moments of AdamW in their own dtype."""
    return ours(width_of(model), precision)


def width_of(model: nn.Module) -> int:
    """Bytes of an element of the model's parameters."""
    return next((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), 4)


def accelerator() -> str:
    """The profile of this machine's device, by its name. Raises AutoparError ``unknown-hardware``."""
    if not torch.cuda.is_available():
        return "cpu"
    device = torch.cuda.get_device_name()
    found = profiles.of_device(device)
    if found is None:
        fix = f"give a mesh and a strategy; there are profiles of {', '.join(profiles.names())}"
        raise AutoparError("unknown-hardware", f'strategy="auto": no profile of {device!r}', fix)
    return found
