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
from autopar.errors import AutoparError, tell
from autopar.families import Example, Sample, families, width_of
from autopar.ir.mesh import KNOWN_AXES, Mesh
from autopar.learned import Named, plan_named
from autopar.lowering import Lowering
from autopar.passes.pipeline import parse
from autopar.plans import Plan, Plans
from autopar.ranking import LOWERED, SPARE, cluster_of, lowered, planned, priced, space_of
from autopar.runtime.garbage import uncollected
from autopar.strategy import Strategy, written


@uncollected()
def plan(
    model: nn.Module | str,
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
    lower: int | None = None,
) -> Plans:
    """The fastest strategies that fit, best first. Allocates no model: it may lie on the meta device.

    Args:
        model: a module, or a name as the command line takes it: of a preset (``hf:NAME``) what is kept is used.
        cluster: hardware and devices, as ``h100x64``.
        args, kwargs: example inputs; their rows and positions do not matter where ``batch`` and ``sequence`` are given.
            A named model has its own.
        batch: rows of the global batch; by default four for each device. sequence: positions of a row.
        precision: as ``Strategy.precision``; bf16 where neither it nor ``strategy`` says. axes: mesh axes that may have
            several ranks. count: plans to return. lower: how many of the first are lowered by the passes, each on the
            program at its own sizes, and ranked again by that; what cannot be lowered falls out. By default 3, or none
            of ``hf:NAME``, which would have to be traced for it.
        mesh: axes whose sizes are decided, as ``tp=8``; the others are chosen. strategy: fields that are decided: those
            that text names, ``zero=0`` too, or those of a Strategy that are not at their default.

    Raises AutoparError ``unknown-hardware``, ``bad-cluster``, ``bad-strategy``, ``input-structure``, and what tracing
    raises.
    """
    machine = cluster_of(cluster)
    own = given(strategy)
    precision = _agreed("precision", precision, own.get("precision"), "bf16")
    _agreed("hardware", machine.name, own.get("hardware"), "")
    fixed = _fixed(mesh, machine.ranks)
    if isinstance(model, str):
        if args or kwargs or loss:
            raise AutoparError("input-structure", f"{model} has inputs and a loss of its own", "pass a module, or none")
        named = Named(model, precision, sequence, say=lambda note: tell([note]))
        return plan_named(
            named, named.known(machine), machine, batch=batch, axes=axes, fixed=fixed, given=tuple(own.items()),
            count=count, lower=lower,
        )  # fmt: skip
    example = Example.of(args, kwargs or {})
    sample = Sample.of(model, args, kwargs or {}, loss=loss, precision=precision)
    positions = sequence or example.positions or 1
    space = space_of(machine, batch, positions, axes, fixed, tuple(own.items()))
    forms, regime = [Forms(f) for f in sample.families(machine).values()], regime_of(model, precision)
    number = LOWERED if lower is None else lower
    if not number:
        return planned(forms, machine, space, regime, count)
    plans = planned(forms, machine, space, regime, max(count, number) + SPARE)
    return lowered(plans, Lowering(model, args, kwargs or {}, precision, loss, sample), number, count)


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
