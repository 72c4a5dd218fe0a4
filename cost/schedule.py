"""Pipeline schedules as data: which action each rank runs after which.

The orders are those that ``torch.distributed.pipelining`` executes. Its classes for several stages a rank compute
theirs when they are made, without any process group, and are asked; its GPipe and 1F1B have theirs in their loops (the
list that 1F1B keeps begins with microbatch 1 on the last rank), so those two are generated here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from autopar.errors import AutoparError

MOST = 4  # microbatches for each rank of a pipeline: its ranks are then idle for less than a fifth of a step
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "gradients of inputs", WEIGHT: "gradients of weights"}


class Action(NamedTuple):
    """What a rank does for one stage and one microbatch.

    ``kind``: F forward, B the whole backward, I the gradients of the stage's inputs, W those of its weights; SEND_F
    and RECV_F post a message of activations, SEND_B and RECV_B one of gradients. The text is torch's: ``1F0`` is the
    forward of microbatch 0 on stage 1.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order of work of every rank of a pipeline.

    Args:
        name: "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv" or "dualpipev".
        orders: what each rank computes, in order.
        posts: the same with the messages where they are posted; receives are posted ahead and waited for at use.
        placement: the rank of each stage.
        microbatches: of a step.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    posts: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def ranks(self) -> int:
        """Ranks along the pipeline."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the rank holds, first to last."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def local(self, cut: int) -> bool:
        """Whether the stages ``cut`` and ``cut + 1`` share a rank, so that nothing is sent between them."""
        return self.placement[cut] == self.placement[cut + 1]


@dataclass(frozen=True)
class _Family:
    """A kind of schedule.

    Args:
        torch: name of its class, for ``get_schedule_class``; None where it is generated here.
        stages: a rank; or more where ``more``. v: whether they are placed back and forth.
        full: whether it needs as many microbatches as stages.
        rounds: whether microbatches run in floor(m / p) equal rounds, as torch's interleaved classes do.
    """

    torch: str | None = None
    stages: int = 1
    more: bool = False
    v: bool = False
    full: bool = False
    rounds: bool = False

    def allows(self, per_rank: int) -> bool:
        """Whether a rank may hold so many stages."""
        return per_rank == self.stages or self.more and per_rank > self.stages


_FAMILIES = {
    "gpipe": _Family(),
    "1f1b": _Family(full=True),
    "interleaved": _Family("Interleaved1F1B", 2, more=True, rounds=True),
    "zero-bubble": _Family("InterleavedZeroBubble", more=True, rounds=True),
    "zbv": _Family("ZBVZeroBubble", 2, v=True),
    "dualpipev": _Family("DualPipeV", 2, v=True, full=True),
}
NAMES = tuple(_FAMILIES)
SPLIT = ("zero-bubble", "zbv", "dualpipev")  # those that run the two halves of a backward apart


def default_schedule(ranks: int, microbatches: int) -> tuple[str, str]:
    """(name, reason) of the schedule for one stage a rank where the user names none."""
    if microbatches >= ranks:
        why = f"{microbatches} microbatches fill {ranks} stages, and 1f1b holds the fewest of them at once"
        return "1f1b", why
    return "gpipe", f"{microbatches} microbatches are fewer than the {ranks} stages that 1f1b needs"


def most_microbatches(name: str, ranks: int, per_rank: int, rows: int) -> tuple[int, bool]:
    """Microbatches of a step where the user names none: the most that divide a rank's ``rows`` and can run.

    Args:
        name: of the schedule; empty where the user names none. per_rank: stages on each rank; 0 for the schedule's own.

    Returns:
        How many, and whether the schedule had no part in it.
    """
    counts = [n for n in range(1, rows + 1) if rows % n == 0 and n <= MOST * ranks]
    able = [n for n in counts if runs(name, ranks, per_rank, n)]
    return max(able or counts), len(able) in (0, len(counts))


def runs(name: str, ranks: int, per_rank: int, microbatches: int) -> bool:
    """Whether the schedule, if one is named, can run so many microbatches; ``per_rank`` as in most_microbatches."""
    try:
        if name:
            check_legal(name, ranks, per_rank or default_stages(name), microbatches)
    except AutoparError:
        return False
    return True


def default_stages(name: str) -> int:
    """Stages a rank where the user gives no number. Raises AutoparError ``schedule``."""
    return _family(name).stages


def check_legal(name: str, ranks: int, per_rank: int, microbatches: int) -> None:
    """Refuse what the schedule cannot run, naming what to change. Raises AutoparError ``schedule``.

    Args:
        ranks: of the pipeline. per_rank: stages on each. microbatches: of a step.
    """
    family, stages = _family(name), ranks * per_rank
    if min(ranks, per_rank, microbatches) < 1:
        text = f"schedule {name}: {ranks} ranks, {per_rank} stages a rank, {microbatches} microbatches"
        raise AutoparError("schedule", text, "each at least 1")
    if not family.allows(per_rank):
        want = f"{'at least' if family.more else 'exactly'} {('one', 'two')[family.stages - 1]}"
        others = ", ".join(n for n, f in _FAMILIES.items() if f.allows(per_rank))
        fix = f"virtual_stages={family.stages}, or a schedule for {per_rank} to a rank: {others}"
        raise AutoparError("schedule", f"schedule {name} wants {want} to a rank, not {per_rank} stages", fix)
    if family.full and microbatches < stages:
        what = f"schedule {name} wants at least as many microbatches as stages: {microbatches} for {stages}"
        fix = f"microbatches={stages} or more, or schedule={'gpipe' if per_rank == 1 else 'zbv'}"
        raise AutoparError("schedule", what, fix)
    if family.rounds and not _rounds(ranks, microbatches):
        what = f"schedule {name} on {ranks} ranks cannot run {microbatches} microbatches in equal rounds"
        below = next(m for m in range(microbatches, 0, -1) if _rounds(ranks, m))
        above = next(m for m in range(microbatches, microbatches + ranks + 1) if _rounds(ranks, m))
        raise AutoparError("schedule", what, f"microbatches={below} or {above}; any multiple of {ranks} works")


def _rounds(ranks: int, microbatches: int) -> bool:
    """Whether floor(m / p) rounds, one at least, run equally many microbatches."""
    return microbatches % max(1, microbatches // ranks) == 0


@cache
def schedule(name: str, ranks: int, per_rank: int, microbatches: int) -> Schedule:
    """The schedule of that name. Raises AutoparError ``schedule`` where it is not legal (``check_legal``)."""
    check_legal(name, ranks, per_rank, microbatches)
    family = _family(name)
    if family.torch is not None:
        posts = _torch_posts(family.torch, ranks, per_rank, microbatches)
    else:
        warmup = [microbatches if name == "gpipe" else min(ranks - r, microbatches) for r in range(ranks)]
        posts = tuple(tuple(_posted(_alternate(r, warmup[r], microbatches), ranks)) for r in range(ranks))
    orders = tuple(tuple(a for a in order if a.kind in COMPUTE) for order in posts)
    return Schedule(name, orders, posts, placement(ranks, per_rank, family.v), microbatches)


def placement(ranks: int, per_rank: int, v: bool = False) -> tuple[int, ...]:
    """The rank of each stage: round and round, or back and forth where ``v``."""
    forth = tuple(range(ranks))
    return sum(((forth[::-1] if v and lap % 2 else forth) for lap in range(per_rank)), ())


def in_flight(plan: Schedule) -> tuple[int, ...]:
    """The most microbatches of each stage that are alive at once: from F to B, or to W where B is split."""
    peaks = [0] * plan.stages
    for rank in range(plan.ranks):
        stages = plan.stages_of(rank)
        for counts in _counts(plan, rank):
            for stage, count in zip(stages, counts):
                peaks[stage] = max(peaks[stage], count)
    return tuple(peaks)


def occupancies(plan: Schedule, rank: int) -> tuple[tuple[int, ...], ...]:
    """What the rank holds at its fullest moments: microbatches alive of each of its stages.

    Moments at which another one holds no less of any stage are left out, so the peak of any weighted sum is among them.
    """
    seen = sorted(set(_counts(plan, rank)), reverse=True)
    return tuple(a for a in seen if not any(a != b and all(x <= y for x, y in zip(a, b)) for b in seen))


def _counts(plan: Schedule, rank: int) -> Iterator[tuple[int, ...]]:
    """Microbatches alive of each of the rank's stages, after each action."""
    alive = dict.fromkeys(plan.stages_of(rank), 0)
    for action in plan.orders[rank]:
        alive[action.stage] += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}.get(action.kind, 0)
        yield tuple(alive.values())


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise AutoparError("schedule", f"no schedule {name!r}", f"one of {', '.join(NAMES)}")
    return _FAMILIES[name]


def _alternate(stage: int, warmup: int, microbatches: int) -> Iterator[Action]:
    """``warmup`` forwards, then a backward and a forward in turn, then the backwards that are left."""
    for m in range(warmup):
        yield Action(stage, FORWARD, m)
    for m in range(microbatches):
        yield Action(stage, BACKWARD, m)
        if warmup + m < microbatches:
            yield Action(stage, FORWARD, warmup + m)


def _posted(order: Iterator[Action], stages: int) -> Iterator[Action]:
    """The order of a rank with one stage, receives before their use and sends behind it."""
    for stage, kind, m in order:
        first, last = (stage > 0, stage < stages - 1) if kind == FORWARD else (stage < stages - 1, stage > 0)
        if first:
            yield Action(stage, f"RECV_{kind}", m)
        yield Action(stage, kind, m)
        if last:
            yield Action(stage, f"SEND_{kind}", m)


def _torch_posts(name: str, ranks: int, per_rank: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    from torch.distributed.pipelining.schedules import get_schedule_class

    stage: Any = SimpleNamespace(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, submod=None)
    cls: Any = get_schedule_class(name)
    made = cls([stage] * per_rank, microbatches)
    return tuple(tuple(_flat(made.pipeline_order_with_comms[rank])) for rank in range(ranks))


def _flat(order: list[Any]) -> Iterator[Action]:
    """torch's actions. A pair that it may overlap runs one after the other, the forward first."""
    known = {*COMPUTE, *SENDS, *RECEIVES}
    for action in order:
        for a in action.sub_actions or (action,):
            if a.computation_type.value in known:
                yield Action(a.stage_index, a.computation_type.value, a.microbatch_index)
