"""autopar: a compiler that makes an unmodified PyTorch model run on a device mesh, equal to the original."""

from autopar.api import parallelize
from autopar.emit.module import ParallelModule
from autopar.errors import AutoparError, AutoparWarning
from autopar.strategy import Strategy
from autopar.verify.numerics import Report, verify

__version__ = "0.1.0"
__all__ = ["AutoparError", "AutoparWarning", "ParallelModule", "Report", "Strategy", "__version__", "parallelize", "verify"]
