"""plan: the strategies for a model on a cluster, ranked by predicted time, within memory."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cost import hardware as profiles
from autopar.cost.candidates import SCHEDULES
from autopar.cost.forms import Forms
from autopar.cost.hardware import Hardware
from autopar.cost.memory import Widths
from autopar.cost.regime import Regime
from autopar.cost.search import Found, search
from autopar.cost.space import ENGINES, Space
from autopar.cost.table import size
from autopar.errors import AutoparError
from autopar.families import Example, families
from autopar.ir.mesh import KNOWN_AXES, Mesh
from autopar.passes.pipeline import parse
from autopar.plans import Plan, Plans
from autopar.runtime.garbage import uncollected
from autopar.strategy import Strategy, written

USABLE = 0.92  # of a device's memory: what is left by its context, the allocator and libraries


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
    machine = profiles.load(cluster)
    if not machine.ranks:
        raise AutoparError("bad-cluster", f"cluster {cluster!r} has no number of devices", "write NAMExN, as h100x64")
    own = given(strategy)
    precision = _agreed("precision", precision, own.get("precision"), "bf16")
    _agreed("hardware", machine.name, own.get("hardware"), "")
    example = Example.of(args, kwargs or {})
    made = families(model, args, kwargs or {}, hardware=machine, loss=loss, precision=precision)
    forms = [Forms(f) for f in made.values()]
    positions = sequence or example.positions or 1
    fixed = _fixed(mesh, machine.ranks)
    space = Space(
        machine.ranks, machine.node, batch or 4 * machine.ranks, positions, axes, own.get("offload") == "cpu", fixed,
        tuple(own.items()),
    )  # fmt: skip
    regime = regime_of(model, precision)
    return planned(forms, machine, space, regime, count)


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
        own = ", ".join(f"{k}={v}" for k, v in (*space.fixed, *space.given))
        return (
            f"no mesh of {space.ranks} devices{own and f' with {own}'} divides the model and a batch of {space.batch}; "
            f"change the batch{own and ', or leave out a part of that'}"
        )
    kind = max(least[0].memory, key=lambda k: least[0].memory[k])
    over = least[0].peak - found.limit
    text = (
        f"nothing fits: the smallest needs {size(least[0].peak)} a device, {size(over)} over {size(found.limit)} "
        f"({kind} {size(least[0].memory[kind])}): {least[0].words}"
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
