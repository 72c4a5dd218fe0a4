"""A schedule does every action once, on its rank, in an order that can run, and every message is sent and received."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from autopar.cost.schedule import BACKWARD, COMPUTE, FORWARD, INPUT, RECEIVES, SENDS, WEIGHT, Action, Schedule
from autopar.cost.timeline import needs
from autopar.errors import AutoparError

Message = tuple[int, str, int]  # stage that sends, F or B, microbatch


def check_schedule(schedule: Schedule) -> None:
    """Completeness, order and messages of a schedule, as simulated or as lowered for execution.

    Raises AutoparError ``schedule-actions`` (missing, repeated, or on another rank than its stage),
    ``schedule-deadlock`` (what each rank waits for), and ``schedule-messages`` (sends and receives of two ranks that do
    not pair in order).
    """
    check_actions(schedule)
    check_progress(schedule)
    check_messages(schedule)


def check_actions(schedule: Schedule) -> None:
    """Each stage runs each microbatch forward once, and backward once, whole or in two parts."""
    done = Counter(a for order in schedule.orders for a in order)
    for rank, order in enumerate(schedule.orders):
        for a in order:
            if not (0 <= a.stage < schedule.stages and 0 <= a.microbatch < schedule.microbatches and a.kind in COMPUTE):
                raise _error("actions", schedule, f"rank {rank} runs {a}, which the step does not have")
            if schedule.placement[a.stage] != rank:
                raise _error(
                    "actions", schedule, f"rank {rank} runs {a}, a stage of rank {schedule.placement[a.stage]}"
                )
            if done[a] > 1:
                raise _error("actions", schedule, f"{a} runs {done[a]} times")
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            parts = {k for k in COMPUTE if Action(stage, k, m) in done}
            if parts not in ({FORWARD, BACKWARD}, {FORWARD, INPUT, WEIGHT}):
                ran = ", ".join(sorted(parts)) or "nothing"
                what = f"stage {stage}, microbatch {m} runs {ran}: not F with B, nor F with I and W"
                raise _error("actions", schedule, what)


def check_progress(schedule: Schedule) -> None:
    """Every action can run: no cycle between the orders of ranks and what actions need of each other."""
    done: set[Action] = set()
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order) and done.issuperset(needs(order[at[rank]], schedule.stages)):
                action = order[at[rank]]
                done.add(_split(action))
                at[rank] += 1
                moved = True
    waits = []
    for rank, (order, i) in enumerate(zip(schedule.orders, at)):
        if i < len(order):
            missing = " and ".join(str(n) for n in needs(order[i], schedule.stages) if n not in done)
            waits.append(f"rank {rank} at {order[i]} for {missing}")
    if waits:
        raise _error("deadlock", schedule, "it stops with " + "; ".join(waits))


def check_messages(schedule: Schedule) -> None:
    """Between two ranks, the k-th message sent is the k-th received; posted after it is made and before it is used."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, order in enumerate(schedule.posts):
        if tuple(a for a in order if a.kind in COMPUTE) != schedule.orders[rank]:
            raise _error("messages", schedule, f"rank {rank} computes another order than the schedule's")
        _check_posts(schedule, rank, order)
        for a in order:
            if a.kind in SENDS:
                sent[rank, schedule.placement[_next(a)]].append((a.stage, a.kind[-1], a.microbatch))
            elif a.kind in RECEIVES:
                source = a.stage + (-1 if a.kind[-1] == FORWARD else 1)
                received[schedule.placement[source], rank].append((source, a.kind[-1], a.microbatch))
    for pair in sorted({*sent, *received}):
        _check_pair(schedule, pair, sent[pair], received[pair])


def _check_posts(schedule: Schedule, rank: int, order: Iterable[Action]) -> None:
    """What the rank computes, it sends afterwards; what it needs, it receives before."""
    done: set[Action] = set()
    wanted: set[Action] = set()
    for a in order:
        if a.kind in SENDS and Action(a.stage, FORWARD if a.kind[-1] == FORWARD else INPUT, a.microbatch) not in done:
            raise _error("messages", schedule, f"rank {rank} posts {a} before it has computed it")
        if missing := [r for r in _receives(schedule, a) if r not in done]:
            raise _error("messages", schedule, f"rank {rank} runs {a} without {missing[0]}")
        if a.kind in SENDS and a not in wanted:
            raise _error("messages", schedule, f"rank {rank} posts {a}, which no stage of another rank waits for")
        wanted.discard(a)
        wanted.update(_sends(schedule, a))
        done.add(_split(a))
    if wanted:
        raise _error("messages", schedule, f"rank {rank} never sends {', '.join(map(str, sorted(wanted)))}")


def _sends(schedule: Schedule, a: Action) -> Iterator[Action]:
    """The message that an action must be followed by."""
    if a.kind == FORWARD and a.stage < schedule.stages - 1 and not schedule.local(a.stage):
        yield a._replace(kind="SEND_F")
    if a.kind in (BACKWARD, INPUT) and a.stage > 0 and not schedule.local(a.stage - 1):
        yield a._replace(kind="SEND_B")


def _receives(schedule: Schedule, a: Action) -> Iterator[Action]:
    """The message that an action must be preceded by."""
    if a.kind == FORWARD and a.stage > 0 and not schedule.local(a.stage - 1):
        yield a._replace(kind="RECV_F")
    if a.kind in (BACKWARD, INPUT) and a.stage < schedule.stages - 1 and not schedule.local(a.stage):
        yield a._replace(kind="RECV_B")


def _check_pair(schedule: Schedule, pair: tuple[int, int], sent: list[Message], received: list[Message]) -> None:
    if sent == received:
        return
    at = next((i for i, (s, r) in enumerate(zip(sent, received)) if s != r), min(len(sent), len(received)))
    names = [f"{m[0]}{m[1]}{m[2]}" if m else "nothing" for m in ((*sent, None)[at], (*received, None)[at])]
    what = f"message {at} from rank {pair[0]} to rank {pair[1]} is sent as {names[0]} and received as {names[1]}"
    raise _error("messages", schedule, what)


def _next(send: Action) -> int:
    return send.stage + (1 if send.kind[-1] == FORWARD else -1)


def _split(action: Action) -> Action:
    """A whole backward gives its inputs' gradients, too."""
    return action._replace(kind=INPUT) if action.kind == BACKWARD else action


def _error(kind: str, schedule: Schedule, what: str) -> AutoparError:
    fix = "this is a fault of a pass, please report it"
    return AutoparError(f"schedule-{kind}", f"schedule {schedule.name}: {what}", fix)
