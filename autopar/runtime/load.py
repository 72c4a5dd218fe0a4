"""How many tokens chose each expert: noted while a step runs, asked for afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime._functional import reduced
from autopar.runtime.axis import Axis


@dataclass(frozen=True)
class ExpertLoad:
    """How evenly a layer's experts were chosen in a step.

    Args:
        tokens: [E], choices of each expert, over all data ranks.
        ranks: [N], choices that each coordinate of ``ep`` computed.
    """

    tokens: Tensor
    ranks: Tensor

    @property
    def imbalance(self) -> float:
        """Choices of the busiest rank over their mean: 1 where routing is balanced."""
        return float(self.ranks.max() / self.ranks.double().mean().clamp(min=1.0))


@dataclass
class Loads:
    """The choices of a rank's tokens since ``reset``, by path of the layer."""

    counts: dict[str, Tensor] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.counts.clear()

    def at(self, path: str) -> "Counts":
        """Where the unit at ``path`` takes note."""
        return Counts(self, path)

    def total(self, axes: Mapping[str, Axis], over: tuple[str, ...], ways: int) -> dict[str, ExpertLoad]:
        """The load of each layer. Collective over the axes ``over``.

        Raises AutoparError ``no-load`` where nothing was noted.
        """
        if not self.counts:
            fix = "run a step first, on a mesh with ep"
            raise AutoparError("no-load", "expert_load: no experts were shared out over ep in the last step", fix)
        out = {}
        for path, counts in self.counts.items():
            for axis in over:
                counts = reduced(counts, axes[axis])
            out[path] = ExpertLoad(counts, counts.view(ways, -1).sum(1))
        return out


@dataclass(frozen=True)
class Counts:
    """A unit's part of Loads."""

    loads: Loads
    path: str

    def note(self, layer: str, counts: Tensor) -> None:
        """Add [E] choices of a layer inside the unit; what a backward computes again is not counted twice."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        key = ".".join(filter(None, (self.path, layer)))
        before = self.loads.counts.get(key)
        self.loads.counts[key] = counts if before is None else before + counts
