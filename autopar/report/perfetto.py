"""Simulated steps as a trace that Perfetto and chrome://tracing open."""

from collections.abc import Iterator, Sequence
from typing import Any

from autopar.cost.rehearsal import Rehearsal
from autopar.cost.schedule import BACKWARD, FORWARD, INPUT, WORDS, Action
from autopar.cost.timeline import Span, Timeline

Event = dict[str, Any]


def trace_of(rows: Sequence[tuple[str, Rehearsal]]) -> dict[str, Any]:
    """The trace event format: a process for each strategy, a thread for each rank of its pipeline, times in µs.

    Arrows are messages between stages: from the end of what made a value to the start of what waits for it. Behind the
    last action stand the sums of gradients and the optimizer.
    """
    events: list[Event] = []
    for pid, (name, step) in enumerate(rows, 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        events += _step(pid, step)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step(pid: int, step: Rehearsal) -> Iterator[Event]:
    line = step.timeline
    for rank, spans in enumerate(line.spans):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for span in spans:
            args = {"stage": span.action.stage, "microbatch": span.action.microbatch}
            yield _event(pid, rank, str(span.action), WORDS[span.action.kind], span.start, span.end, args)
        start = line.seconds
        for name, seconds in (("gradients", step.gradients[rank]), ("optimizer", step.optimizer[rank])):
            if seconds:
                yield _event(pid, rank, name, name, start, start + seconds, {})
            start += seconds
    yield from _messages(pid, line)


def _event(pid: int, rank: int, name: str, kind: str, start: float, end: float, args: dict[str, int]) -> Event:
    return {
        "ph": "X", "name": name, "cat": kind, "pid": pid, "tid": rank, "ts": start * 1e6, "dur": (end - start) * 1e6,
        "args": args,
    }  # fmt: skip


def _messages(pid: int, line: Timeline) -> Iterator[Event]:
    """A start and an end for each message between ranks."""
    found: dict[Action, tuple[int, Span]] = {}
    for rank, spans in enumerate(line.spans):
        for span in spans:
            kind = INPUT if span.action.kind == BACKWARD else span.action.kind
            found[span.action._replace(kind=kind)] = rank, span
    number = 0
    for action, (rank, span) in found.items():
        step = {FORWARD: 1, INPUT: -1}.get(action.kind, 0)
        other = action._replace(stage=action.stage + step)
        if step and other in found and found[other][0] != rank:
            to, later = found[other]
            number += 1
            common = {"name": "message", "cat": "message", "id": pid * 10**7 + number, "pid": pid}
            yield {**common, "ph": "s", "tid": rank, "ts": span.end * 1e6}
            yield {**common, "ph": "f", "bp": "e", "tid": to, "ts": later.start * 1e6}
