"""How many tokens chose each expert: noted while a step runs, asked for afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.placement import Placement
from autopar.runtime._functional import reduced
from autopar.runtime.axis import Axis
from autopar.runtime.placed import Placed


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


def below(path: str, layer: str) -> str:
    """The path of a layer from the unit at ``path`` on. Its own begins with the unit's, where ``*`` may be a number."""
    return ".".join(layer.split(".")[path.count(".") + 1 :]) if path else layer


def layer_at(path: str, layer: str) -> str:
    """The path of a layer in the unit at ``path``."""
    return ".".join(filter(None, (path, below(path, layer))))


@dataclass
class Loads:
    """The choices of a rank's tokens since ``reset``, by path of the layer, and where its experts are.

    Args:
        counts: choices of each expert, or of each slot where the layer has a placement.
        along: the axis that shares out the experts of each layer.
        placed: of the layers whose experts are not in the model's own order.
    """

    counts: dict[str, Tensor] = field(default_factory=dict)
    along: dict[str, Axis] = field(default_factory=dict)
    placed: Mapping[str, Placed] = field(default_factory=dict)

    @staticmethod
    def of(placement: Mapping[str, Placement] | None) -> "Loads":
        """With the placements of some layers."""
        return Loads(placed={layer: Placed.of(p) for layer, p in (placement or {}).items()})

    def reset(self) -> None:
        """Forget everything."""
        self.counts.clear()
        self.along.clear()

    def at(self, path: str) -> "Counts":
        """Where the unit at ``path`` takes note."""
        inside = (n for n in self.placed if not path or f"{n}.".startswith(f"{path}."))
        return Counts(self, path, {below(path, n): self.placed[n] for n in inside})

    def total(self, axes: Mapping[str, Axis], over: tuple[str, ...]) -> dict[str, ExpertLoad]:
        """The load of each layer. Collective over the axes ``over``, and those that share out experts.

        Raises AutoparError ``no-load`` where nothing was noted.
        """
        if not self.counts:
            fix = "run a step first, on a mesh with ep"
            raise AutoparError("no-load", "expert_load: no tokens travelled to experts in the last step", fix)
        out = {}
        for path, counts in self.counts.items():
            own = self.along[path]
            for axis in dict.fromkeys((*over, own.name)):
                counts = reduced(counts, axes[axis])
            placed = self.placed.get(path)
            out[path] = ExpertLoad(*(placed.load(counts) if placed else (counts, counts.view(own.size, -1).sum(1))))
        return out


@dataclass(frozen=True)
class Counts:
    """A unit's part of Loads. Layers are named by paths in which ``*`` may stand for the unit's own number."""

    loads: Loads
    path: str
    placed: Mapping[str, Placed] = field(default_factory=dict)  # by path below the unit

    def at(self, layer: str) -> Placed | None:
        """Where the experts of a layer inside the unit are; None where they are in order."""
        return self.placed.get(below(self.path, layer)) if self.placed else None

    def note(self, layer: str, counts: Tensor, axis: Axis) -> None:
        """Add [E] choices of a layer whose experts ``axis`` shares out; a backward that computes again adds none."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        key = layer_at(self.path, layer)
        self.loads.along[key] = axis
        before = self.loads.counts.get(key)
        self.loads.counts[key] = counts if before is None else before + counts
