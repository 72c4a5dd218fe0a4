"""Schedules as data: torch's orders, the counts that are legal, microbatches in flight."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.cost.schedule import (
    COMPUTE,
    NAMES,
    Action,
    check_legal,
    default_schedule,
    default_stages,
    in_flight,
    occupancies,
    placement,
    schedule,
)
from autopar.errors import AutoparError
from autopar.verify.schedule import check_schedule

CLASSES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
COUNTS = [*product(NAMES, (1, 2, 3, 4, 5), (1, 2, 3), (1, 2, 3, 4, 6, 7, 8, 10, 12, 16))]


def legal(*counts: Any) -> bool:
    try:
        check_legal(*counts)
    except AutoparError as error:
        assert error.slug == "schedule" and error.fix
        return False
    return True


def made(name: str, p: int, v: int, m: int, rank: int = 0) -> Any:
    """torch's schedule over stand-ins for stages that record what is run."""
    ran: list[Action] = []
    stage = SimpleNamespace(num_stages=p * v, group_size=p, group_rank=rank, stage_index=rank, submod=None, ran=ran)
    if name not in ("gpipe", "1f1b"):
        return CLASSES[name]([stage] * v, m)  # type: ignore[arg-type]
    for kind in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        setattr(stage, f"get_{kind}_ops", lambda m: [])
    stage.forward_one_chunk = lambda m, *a, **k: ran.append(Action(rank, "F", m))
    stage.backward_one_chunk = lambda m, **k: ran.append(Action(rank, "B", m))
    stage.perform_reduce_grad = lambda scale: None
    made: Any = CLASSES[name](stage, m)  # type: ignore[arg-type]
    made._check_inputs = lambda *a: ([()] * m, [{}] * m)
    made._initialize_stage = made._maybe_compute_loss = made._maybe_get_loss = made._update_losses = lambda *a: None
    return made


def test_every_legal_schedule_is_complete_runs_and_pairs_its_messages() -> None:
    found = [c for c in COUNTS if legal(*c)]
    assert {c[0] for c in found} == set(NAMES)
    for counts in found:
        check_schedule(schedule(*counts))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_a_rank_runs_as_torch_executes_it(name: str) -> None:
    for p, m in product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 8, 13)):
        if not legal(name, p, 1, m):
            continue
        for rank in range(p):
            runner = made(name, p, 1, m, rank)
            runner._step_microbatches()
            assert runner._stage.ran == list(schedule(name, p, 1, m).orders[rank]), (p, m, rank)


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_several_stages_a_rank_run_in_torch_s_order(name: str) -> None:
    tried = 0
    for p, v, m in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8, 9)):
        if not legal(name, p, v, m):
            continue
        tried += 1
        theirs, mine = made(name, p, v, m), schedule(name, p, v, m)
        assert mine.placement == tuple(theirs.stage_index_to_group_rank[s] for s in range(p * v))
        for rank in range(p):
            flat = [b for a in theirs.pipeline_order[rank] if a is not None for b in a.sub_actions or (a,)]
            assert [str(a) for a in mine.orders[rank]] == [str(a) for a in flat]
            posts = [b for a in theirs.pipeline_order_with_comms[rank] for b in a.sub_actions or (a,)]
            messages = [str(b) for b in posts if b.computation_type.value[:4] in ("SEND", "RECV")]
            assert [str(a) for a in mine.posts[rank] if a.kind not in COMPUTE] == messages
    assert tried > 5


def test_torch_refuses_what_is_illegal_and_no_more() -> None:
    """But for one stage a rank of the interleaved schedule, which torch runs as 1F1B with more in flight."""
    for name, p, v, m in COUNTS:
        if name in ("gpipe", "1f1b") and v > 1 or (name, v) == ("interleaved", 1):
            assert not legal(name, p, v, m)
            continue
        try:
            made(name, p, v, m)
        except (ValueError, KeyError):
            assert not legal(name, p, v, m), (name, p, v, m)
        else:
            assert legal(name, p, v, m), (name, p, v, m)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (("1f1b", 4, 1, 3), ["3 for 4", "microbatches=4", "schedule=gpipe"]),
        (("1f1b", 4, 2, 8), ["exactly one", "virtual_stages=1", "interleaved"]),
        (("interleaved", 4, 1, 8), ["at least two", "virtual_stages=2", "1f1b"]),
        (("interleaved", 4, 2, 9), ["9 microbatches in equal rounds", "microbatches=8 or 10", "multiple of 4"]),
        (("zero-bubble", 4, 2, 13), ["13 microbatches", "microbatches=12 or 15"]),
        (("zbv", 2, 3, 4), ["exactly two", "virtual_stages=2"]),
        (("dualpipev", 2, 2, 3), ["3 for 4", "microbatches=4", "zbv"]),
        (("gpipe", 2, 1, 0), ["0 microbatches", "at least 1"]),
        (("2f2b", 2, 1, 4), ["2f2b", "one of gpipe, 1f1b"]),
    ],
)
def test_a_refusal_says_what_to_change(counts: Any, words: list[str]) -> None:
    with pytest.raises(AutoparError) as caught:
        schedule(*counts)
    assert caught.value.slug == "schedule"
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_defaults() -> None:
    assert default_schedule(4, 3)[0] == "gpipe" and "fewer than the 4 stages" in default_schedule(4, 3)[1]
    assert default_schedule(4, 4)[0] == "1f1b"
    for p, m in product((1, 2, 4), (1, 2, 8)):
        assert legal(default_schedule(p, m)[0], p, 1, m)
    assert [default_stages(n) for n in NAMES] == [1, 1, 2, 1, 2, 2]


def test_placements() -> None:
    assert placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert placement(3, 2, v=True) == (0, 1, 2, 2, 1, 0)
    assert [schedule("zbv", 3, 2, 5).stages_of(r) for r in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_microbatches_in_flight() -> None:
    for p, m in product((1, 2, 4, 7), (1, 2, 7, 8, 20)):
        assert in_flight(schedule("gpipe", p, 1, m)) == (m,) * p
        if m >= p:
            assert in_flight(schedule("1f1b", p, 1, m)) == tuple(min(m, p - s) for s in range(p))


def test_the_fullest_moments_of_a_rank() -> None:
    """Of 4 ranks, interleaved, the first holds 8 microbatches of its first stage and 3 of its second, or 7 and 4."""
    plan = schedule("interleaved", 4, 2, 8)
    assert occupancies(plan, 0) == ((8, 3), (7, 4))
    assert occupancies(plan, 3) == ((5, 0), (4, 1))
    assert in_flight(plan)[::4] == (8, 4)
