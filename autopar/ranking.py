"""Families to ranked plans: the part of planning that needs no model, and so neither torch nor a trace."""

from dataclasses import replace
from typing import Any

from autopar.cost import hardware as profiles
from autopar.cost.forms import Forms
from autopar.cost.hardware import Hardware
from autopar.cost.regime import Regime
from autopar.cost.search import Found, search
from autopar.cost.space import Space
from autopar.cost.table import size
from autopar.errors import AutoparError
from autopar.ir.mesh import KNOWN_AXES
from autopar.plans import Plan, Plans

USABLE = 0.92  # of a device's memory: what is left by its context, the allocator and libraries


def cluster_of(text: str) -> Hardware:
    """Hardware and devices, as ``h100x64``. Raises AutoparError ``bad-cluster``, ``unknown-hardware``."""
    machine = profiles.load(text)
    if not machine.ranks:
        raise AutoparError("bad-cluster", f"cluster {text!r} has no number of devices", "write NAMExN, as h100x64")
    return machine


def space_of(
    machine: Hardware, batch: int | None, positions: int, axes: tuple[str, ...] = KNOWN_AXES,
    fixed: tuple[tuple[str, int], ...] = (), given: tuple[tuple[str, Any], ...] = (),
) -> Space:  # fmt: skip
    """What is asked of a cluster. ``batch``: rows of the global batch; by default four for each device."""
    offload = dict(given).get("offload") == "cpu"
    return Space(machine.ranks, machine.node, batch or 4 * machine.ranks, positions, axes, offload, fixed, given)


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
