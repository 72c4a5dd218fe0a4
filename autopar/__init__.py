"""autopar: a compiler that makes an unmodified PyTorch model run on a device mesh, equal to the original."""

from typing import TYPE_CHECKING

from autopar.lazy import lazily

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
# Planning needs none of torch's engines, and so takes half the time.
__getattr__, __dir__ = lazily(__name__, _PLACES, ["verify"])
