"""What ops of LOCAL programs stand for: the conversion that a runtime collective is, and what it sends."""

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.cost.communication import CONVERSIONS, Step
from autopar.rules.local import ROWS
from autopar.runtime import collectives

STEPS: dict[Callable[..., Any], tuple[Step, Step]] = {
    **{ROWS[src.__name__[0] + dst.__name__[0]]: steps for (src, dst), steps in CONVERSIONS.items()},
    collectives.all_to_all: ("all_to_all", "all_to_all"),
}
"""The collectives that each runtime conversion issues, forward and backward."""

IDENTITIES = (collectives.to_replicated, collectives.to_invariant)
"""Conversions whose result is their input."""


def steps_of(node: fx.Node) -> tuple[Step, Step]:
    """The collectives of a runtime conversion; a shard that stays in its dim is gathered and sliced, both ways."""
    if node.target is collectives.all_to_all and node.args[1] == node.args[2]:
        return "all_gather", "all_gather"
    return STEPS[node.target]  # type: ignore[index]


def axis_of(node: fx.Node) -> str:
    """The mesh axis of a runtime conversion."""
    return next(str(a.meta["handle"]) for a in node.all_input_nodes if "handle" in a.meta)
