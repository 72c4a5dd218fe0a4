"""Published model configurations, as small JSON files, and the rule that shrinks any of them to a tiny one."""

from autopar.presets.shrink import tiny
from autopar.presets.table import configuration, names

__all__ = ["configuration", "names", "tiny"]
