"""From an unmodified model to a Program: export, normalize, recognize, fold."""

from autopar.trace.structure import Structure
from autopar.trace.tracing import Traced, trace

__all__ = ["Structure", "Traced", "trace"]
