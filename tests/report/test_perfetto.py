"""The trace of a simulated step: the schedule's own actions, one at a time on a rank, and every message answered."""

import json
from collections import Counter, defaultdict

import pytest

from autopar.cost.rehearsal import Rehearsal
from autopar.cost.schedule import NAMES, schedule
from autopar.cost.search import Option
from autopar.cost.timeline import Times, simulate
from autopar.report.perfetto import trace_of


def step(name: str, ranks: int = 4, microbatches: int = 8) -> Rehearsal:
    plan = schedule(name, ranks, 1 if name in ("gpipe", "1f1b") else 2, microbatches)
    line = simulate(plan, Times.equal(plan.stages, 1e-3, 1e-3, 1e-3, 1e-4))
    option = Option.__new__(Option)  # a trace does not look at it
    return Rehearsal(option, line, (2e-3,) * ranks, (1e-3,) * ranks, ())


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_has_the_schedule_s_actions_and_no_two_at_once(name):
    made = step(name)
    events = json.loads(json.dumps(trace_of([(name, made)])))["traceEvents"]
    ranks = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            ranks[e["tid"]].append(e)
    for rank, order in enumerate(made.timeline.schedule.orders):
        spans = sorted(ranks[rank], key=lambda e: e["ts"])
        assert [e["name"] for e in spans] == [*map(str, order), "gradients", "optimizer"]
        for a, b in zip(spans, spans[1:]):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    assert max(e["ts"] + e["dur"] for e in ranks[0]) == pytest.approx((made.timeline.seconds + 3e-3) * 1e6)


@pytest.mark.parametrize("name", NAMES)
def test_every_message_is_sent_once_and_received_later_on_another_rank(name):
    made = step(name)
    events = trace_of([(name, made)])["traceEvents"]
    sent = {e["id"]: e for e in events if e["ph"] == "s"}
    received = {e["id"]: e for e in events if e["ph"] == "f"}
    assert sent.keys() == received.keys()
    plan = made.timeline.schedule
    cuts = sum(not plan.local(c) for c in range(plan.stages - 1))
    assert len(sent) == 2 * cuts * plan.microbatches == len(sent.keys())
    for key, start in sent.items():
        assert start["ts"] <= received[key]["ts"] + 1e-6 and start["tid"] != received[key]["tid"]


def test_strategies_are_processes_with_names():
    events = trace_of([("one", step("gpipe")), ("two", step("1f1b"))])["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "one", 2: "two"}
    assert Counter(e["pid"] for e in events if e["ph"] == "X")[1] == 4 * 18
