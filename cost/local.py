"""What ops of LOCAL programs stand for: the conversion that a runtime collective is, and what it sends."""

from collections.abc import Callable
from typing import Any

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
