"""A price: what one rank computes, sends and holds in a step, as numbers or as expressions of the axis sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.cost.symbols import Number

FORWARD, BACKWARD, GRADIENT = "forward", "backward", "gradient"


@dataclass(frozen=True)
class Traffic:
    """One kind of collective on one mesh axis in one part of a step.

    Args:
        axis: mesh axis; several joined by ``+`` where the group spans them.
        collective: all_gather, reduce_scatter, all_reduce or all_to_all.
        when: forward, backward, or gradient (the engine's sum over data axes).
        calls: collectives issued. bytes: sent by one rank in all of them. seconds: of all of them, nothing hidden.
    """

    axis: str
    collective: str
    when: str
    calls: int
    bytes: "Number"
    seconds: "Number"


@dataclass(frozen=True)
class Price:
    """What a step costs one rank: the one that holds most. Flops, bytes, seconds.

    Args:
        hardware: profile. mesh: as text. ranks: of the mesh.
        model_flops: forward and backward of the unsharded model on the global batch.
        flops: (forward, backward). compute_seconds: (forward, backward), roofline.
        traffic: every collective. memory: bytes by kind (parameters, gradients, optimizer, activations,
            workspace: messages of the largest dispatch).
        capacity: bytes of device memory. peak: flops per second of one rank in the model's dtype.
    """

    hardware: str
    mesh: str
    ranks: "Number"
    model_flops: "Number"
    flops: "tuple[Number, Number]"
    compute_seconds: "tuple[Number, Number]"
    traffic: tuple[Traffic, ...] = ()
    memory: "Mapping[str, Number]" = field(default_factory=dict)
    capacity: float = 0.0
    peak: float = 0.0

    @property
    def communication_seconds(self) -> "Number":
        """Seconds of all collectives, none hidden behind compute."""
        return sum(t.seconds for t in self.traffic)

    @property
    def step_seconds(self) -> "Number":
        """Compute and communication, one after the other: an upper bound."""
        return sum(self.compute_seconds) + self.communication_seconds

    @property
    def memory_bytes(self) -> "Number":
        """Bytes of everything in ``memory``."""
        return sum(self.memory.values())

    @property
    def mfu(self) -> "Number":
        """Model flops utilization: model flops over what all ranks could do in ``step_seconds``."""
        return self.model_flops / (self.ranks * self.peak * self.step_seconds)

    def wire_bytes(self, axis: str | None = None, when: str | None = None) -> "Number":
        """Bytes that one rank sends, on one axis or all, in one part of the step or all."""
        return sum(t.bytes for t in self.traffic if axis in (None, t.axis) and when in (None, t.when))

    def calls(self, axis: str, when: str, collective: str | None = None) -> int:
        """Collectives issued on ``axis`` in that part of the step."""
        chosen = (t for t in self.traffic if (t.axis, t.when) == (axis, when))
        return sum(t.calls for t in chosen if collective in (None, t.collective))

    def at(self, sizes: Mapping[str, float]) -> "Price":
        """This closed form at given axis sizes. Raises KeyError where one is missing."""
        from autopar.cost.symbols import evaluate  # a search needs no symbols

        return self._map(lambda value: evaluate(value, sizes))

    def _map(self, number: "Callable[[Number], Number]") -> "Price":
        return replace(
            self,
            ranks=number(self.ranks),
            model_flops=number(self.model_flops),
            flops=(number(self.flops[0]), number(self.flops[1])),
            compute_seconds=(number(self.compute_seconds[0]), number(self.compute_seconds[1])),
            traffic=tuple(replace(t, bytes=number(t.bytes), seconds=number(t.seconds)) for t in self.traffic),
            memory={kind: number(value) for kind, value in self.memory.items()},
        )
