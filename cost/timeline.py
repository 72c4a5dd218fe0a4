"""What a schedule takes: the start and end of every action, from the seconds of each stage and each cut.

A rank runs its actions in order, one at a time. Sends are asynchronous: what a stage makes arrives the cut's seconds
later, and the receiver waits for it, idle. Stages of one rank hand over at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from autopar.errors import AutoparError


@dataclass(frozen=True)
class Times:
    """Seconds of one microbatch.

    Args:
        forward, input, weight: of each stage; a whole backward takes ``input + weight``.
        sends: of the activations across each cut between two stages, and of their gradients back; none where empty.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    sends: tuple[tuple[float, float], ...] = ()

    @staticmethod
    def equal(stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, send: float = 0.0) -> "Times":
        """The same for every stage and every cut."""
        return Times((forward,) * stages, (input,) * stages, (weight,) * stages, ((send, send),) * (stages - 1))

    def of(self, action: Action) -> float:
        """Seconds of an action."""
        s = action.stage
        parts = {
            FORWARD: self.forward[s],
            INPUT: self.input[s],
            WEIGHT: self.weight[s],
            BACKWARD: self.input[s] + self.weight[s],
        }
        return parts[action.kind]

    def send(self, source: int, target: int) -> float:
        """Seconds from one stage to its neighbour."""
        return self.sends[min(source, target)][source > target] if self.sends else 0.0


@dataclass(frozen=True)
class Span:
    """An action and when it runs, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time: the spans of each rank, in order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """Of the step: from its start to the last action's end."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the step in which each rank waits."""
        return tuple(self.seconds - sum(s.end - s.start for s in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle."""
        return sum(self.idle) / (len(self.spans) * self.seconds) if self.seconds else 0.0


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """What must have ended before the action can begin; an I stands for an I or a B."""
    s, kind, m = action
    if kind == FORWARD:
        return (Action(s - 1, FORWARD, m),) if s else ()
    own = (Action(s, INPUT if kind == WEIGHT else FORWARD, m),)
    return own if kind == WEIGHT or s == stages - 1 else (*own, Action(s + 1, INPUT, m))


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """When every action runs. Raises AutoparError ``schedule-deadlock`` where some never can."""
    _check(schedule, times)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    free, at = [0.0] * schedule.ranks, [0] * schedule.ranks
    left = True
    while left:
        left = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order) and (ready := _ready(order[at[rank]], schedule, times, ends)) is not None:
                action = order[at[rank]]
                start = max(free[rank], ready)
                free[rank] = start + times.of(action)
                spans[rank].append(Span(action, start, free[rank]))
                ends[action._replace(kind=INPUT) if action.kind == BACKWARD else action] = free[rank]
                at[rank] += 1
                left = True
    stuck = [order[i] for order, i in zip(schedule.orders, at) if i < len(order)]
    if stuck:
        what = f"schedule {schedule.name}: {', '.join(map(str, stuck))} can never run"
        raise AutoparError("schedule-deadlock", what, "autopar.verify.schedule.check_schedule says what each waits for")
    return Timeline(schedule, tuple(map(tuple, spans)))


def _ready(action: Action, schedule: Schedule, times: Times, ends: dict[Action, float]) -> float | None:
    """When all that the action needs has arrived; None where it is not known yet."""
    arrived = 0.0
    for need in needs(action, schedule.stages):
        if need not in ends:
            return None
        cut = min(need.stage, action.stage)
        far = need.stage != action.stage and not schedule.local(cut)
        arrived = max(arrived, ends[need] + (times.send(need.stage, action.stage) if far else 0.0))
    return arrived


def _check(schedule: Schedule, times: Times) -> None:
    """Refuse seconds of other stages than the schedule's."""
    counts: Sequence[int] = [len(times.forward), len(times.input), len(times.weight)]
    if set(counts) != {schedule.stages} or len(times.sends) not in (0, schedule.stages - 1):
        what = f"times of {counts} stages and {len(times.sends)} cuts for a schedule of {schedule.stages} stages"
        raise AutoparError("schedule", what, f"give {schedule.stages} of each and {schedule.stages - 1} cuts")
