"""What ZeRO stages send and hold: ``fully_shard`` stores 1/N at every stage; the stages differ in when it moves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.communication import Step
from autopar.cost.memory import States
from autopar.cost.price import BACKWARD, FORWARD, GRADIENT
from autopar.cost.symbols import Number, ratio

Sent = tuple[Step, str, Number, bool]  # collective, part of the step, bytes of the whole, over the copies of shards


@dataclass(frozen=True)
class Stage:
    """An engine over data axes.

    Args:
        stage: 0 to 3.
        shard: ranks that share out one copy; all data ranks where None.
        microbatches: of a step.
        low: bytes an element that parameters are gathered in, where it is not their own width (bf16: 2).
        units: of each parameter, the path of the unit that gathers it; "" or absent for the outer function.
    """

    stage: int = 0
    shard: int | None = None
    microbatches: int = 1
    low: int | None = None
    units: Mapping[str, str] | None = None

    def sent(self, inner: Number, outer: Number, width: int) -> Iterator[Sent]:
        """Collectives of a step on ``inner`` bytes of blocks' parameters and ``outer`` of others, ``width`` an element.

        arXiv:1910.02054, section 7, times the microbatches where a stage moves with each of them.
        """
        whole, m = inner + outer, self.microbatches
        if self.stage == 0:
            yield "all_reduce", GRADIENT, whole, False
            return
        scale = ratio(self.low or width, width)
        yield "all_gather", FORWARD, whole * scale * (m if self.stage == 3 else 1), False
        if self.stage == 3:
            yield "all_gather", BACKWARD, inner * scale * m, False
        yield "reduce_scatter", GRADIENT, whole * (m if self.stage > 1 else 1), False
        if self.shard is not None:
            yield "all_reduce", GRADIENT, ratio(whole, self.shard) * (m if self.stage > 1 else 1), True

    def held(self, states: States, ways: Number) -> States:
        """Model states of one rank, of those that it would hold alone."""
        if not self.stage:
            return states
        own = self.shard or ways
        return States(ratio(states.parameters, own), ratio(states.gradients, own), ratio(states.optimizer, own))

    def gathered(self, groups: Mapping[str, Number], width: int) -> Number:
        """Bytes of gathered parameters at the peak, beyond what is stored.

        Args:
            groups: bytes by unit, "" for the outer function. At stage 3 two units at once: one runs, one is prefetched.
        """
        scale = ratio(self.low or width, width)
        if not self.stage:
            return sum(groups.values()) * scale if self.low else 0
        if self.stage < 3:
            return sum(groups.values()) * scale
        units = sorted((v for k, v in groups.items() if k), key=float, reverse=True)[:2]
        return (groups.get("", 0) + sum(units)) * scale
