"""plan: the strategies for a model on a cluster, ranked by predicted time, within memory."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cost import hardware as profiles
from autopar.cost.forms import Forms
from autopar.cost.hardware import Hardware
from autopar.cost.memory import Widths
from autopar.cost.regime import Regime
from autopar.cost.search import Found, search
from autopar.cost.space import Space
from autopar.cost.step import SCHEDULES
from autopar.cost.table import size
from autopar.errors import AutoparError
from autopar.families import Example, families
from autopar.ir.mesh import KNOWN_AXES, Mesh
from autopar.plans import Plan, Plans
from autopar.strategy import Strategy

USABLE = 0.92  # of a device's memory: what is left by its context, the allocator and libraries


def plan(
    model: nn.Module,
    cluster: str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    precision: str = "bf16",
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
        precision: as ``Strategy.precision``. axes: mesh axes that may have several ranks. count: plans to return.
        mesh: axes whose sizes are decided, as ``tp=8``; the others are chosen. strategy: fields that are decided; those
            at their default are chosen.

    Raises AutoparError ``unknown-hardware``, ``bad-cluster``, ``input-structure``, and what tracing raises.
    """
    machine = profiles.load(cluster)
    if not machine.ranks:
        raise AutoparError("bad-cluster", f"cluster {cluster!r} has no number of devices", "write NAMExN, as h100x64")
    example = Example.of(args, kwargs or {})
    made = families(model, args, kwargs or {}, hardware=machine, loss=loss, precision=precision)
    forms = [Forms(f) for f in made.values()]
    positions = sequence or example.positions or 1
    fixed = _fixed(mesh, machine.ranks)
    space = Space(
        machine.ranks, machine.node, batch or 4 * machine.ranks, positions, axes, fixed=fixed, given=decided(strategy)
    )
    regime = regime_of(model, precision)
    return planned(forms, machine, space, regime, count)


def _fixed(mesh: Mapping[str, int] | str | None, ranks: int) -> tuple[tuple[str, int], ...]:
    """The axes that are decided. Raises AutoparError ``bad-mesh`` where they do not divide the devices."""
    sizes = Mesh.parse(mesh) if isinstance(mesh, str) else Mesh.of(mesh or {})
    if ranks % sizes.world:
        raise AutoparError("bad-mesh", f"mesh {sizes} does not divide {ranks} devices", "axes whose product divides it")
    return sizes.axes


def decided(strategy: Strategy | str | None) -> tuple[tuple[str, Any], ...]:
    """The fields of a strategy that a search keeps as they are: those that are not at their default."""
    chosen = Strategy.of(strategy)
    given = {f.name: getattr(chosen, f.name) for f in fields(Strategy) if getattr(chosen, f.name) != f.default}
    for name in ("stages", "passes"):
        if name in given:
            raise AutoparError("bad-strategy", f"{name} of a plan cannot be given", f"leave out {name}, or do not plan")
    wrong = given.get("context_parallel") not in (None, "ring", "ulysses")
    if wrong or given.get("schedule", "1f1b") not in SCHEDULES:
        known = f"context_parallel: ring, ulysses; schedule: {', '.join(SCHEDULES)}"
        raise AutoparError("bad-strategy", f"{chosen} has no price", known)
    return tuple(given.items())


def planned(forms: list[Forms], machine: Hardware, space: Space, regime: Regime, count: int) -> Plans:
    """Search the families and make plans of what is found."""
    limit = USABLE * machine.memory_bytes
    found = search(forms, machine, space, regime, limit)
    tokens = space.batch * space.positions

    def wrap(options: list[Any]) -> tuple[Plan, ...]:
        return tuple(Plan(o, machine, tokens, found) for o in options)

    best, notes = list(found.ranked[:count]), _notes(forms, space)
    hint = "" if best else "\n".join((_hint(found, forms, machine, space, regime), *notes))
    return Plans(wrap(best), wrap(list(found.front)), found, hint, notes)


def _notes(forms: list[Forms], space: Space) -> tuple[str, ...]:
    """Axes of the space that no plan of the model has, and why."""
    if "pp" not in space.axes or any(f.family.order for f in forms):
        return ()
    return ("no plan has stages (pp): they begin with layers that repeat, and the model has none",)


def regime_of(model: nn.Module, precision: str) -> Regime:
    """How the engine holds a model's states: parameters, gradients and both moments of AdamW in their own dtype."""
    own = next((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), 4)
    low = 2 if precision == "bf16" else own
    return Regime(widths=Widths(own, own, 2 * own), compute_width=low, reduce_width=own, update=7.0 * own)


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


def _hint(found: Found, forms: list[Forms], machine: Hardware, space: Space, regime: Regime) -> str:
    """What is over by how much, and the first of a few changes that fits."""
    least = found.least
    if not least:
        return f"no mesh of {space.ranks} devices divides the model and a batch of {space.batch}; change --batch"
    kind = max(least[0].memory, key=lambda k: least[0].memory[k])
    over = least[0].peak - found.limit
    text = (
        f"nothing fits: the smallest needs {size(least[0].peak)} a device, {size(over)} over {size(found.limit)} "
        f"({kind} {size(least[0].memory[kind])}): {least[0].mesh} {least[0].strategy}"
    )
    for words, changed in _relaxed(space):
        if search(forms, machine, changed, regime, found.limit).ranked:
            return f"{text}\nfits with {words}"
    return f"{text}\nneither 16 times the devices nor a sixteenth of the sequence fits"


def _relaxed(space: Space) -> list[tuple[str, Space]]:
    """Changes from small to large: shorter rows, more devices."""
    out = []
    for factor in (2, 4, 8, 16):
        if space.positions % factor == 0 and space.positions // factor > 1:
            out.append((f"sequence {space.positions // factor}", replace(space, positions=space.positions // factor)))
        more = replace(space, ranks=space.ranks * factor, batch=max(space.batch, space.ranks * factor))
        out.append((f"{space.ranks * factor} devices", more))
    return out
