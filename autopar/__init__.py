"""autopar: a compiler that makes an unmodified PyTorch model run on a device mesh, equal to the original."""

import importlib
from typing import TYPE_CHECKING, Any

# A package that bears the name of a function below: it is bound here once, and not again when others import from it.
importlib.import_module(f"{__name__}.verify")
globals().pop("verify")

if TYPE_CHECKING:
    from autopar.api import parallelize
    from autopar.checkpoint.folder import latest, step_folder
    from autopar.checkpoint.safetensors import Weights
    from autopar.cost.placement import place_experts
    from autopar.emit.module import ParallelModule
    from autopar.errors import AutoparError, AutoparWarning
    from autopar.ir.placement import Placement
    from autopar.planner import plan
    from autopar.plans import Plan, Plans
    from autopar.strategy import Strategy
    from autopar.trace.registered import experts, register_experts
    from autopar.verify.numerics import Report, verify

__version__ = "0.1.0"
__all__ = [
    "AutoparError", "AutoparWarning", "ParallelModule", "Placement", "Plan", "Plans", "Report", "Strategy", "Weights",
    "__version__", "experts", "latest", "parallelize", "place_experts", "plan", "register_experts", "step_folder",
    "verify",
]  # fmt: skip

_PLACES = {
    "api": ("parallelize",),
    "checkpoint.folder": ("latest", "step_folder"),
    "checkpoint.safetensors": ("Weights",),
    "cost.placement": ("place_experts",),
    "emit.module": ("ParallelModule",),
    "errors": ("AutoparError", "AutoparWarning"),
    "ir.placement": ("Placement",),
    "planner": ("plan",),
    "plans": ("Plan", "Plans"),
    "strategy": ("Strategy",),
    "trace.registered": ("experts", "register_experts"),
    "verify.numerics": ("Report", "verify"),
}


def __getattr__(name: str) -> Any:
    """A public name, loaded at its first use: planning needs none of torch's engines, and takes half the time."""
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{place}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
