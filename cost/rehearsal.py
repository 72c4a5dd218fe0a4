"""One candidate again, closer: every action of its schedule in time, and memory moment by moment.

A search prices thousands of candidates with sums that hold for all of them. Here one is simulated: each stage's
microbatches in the order of its schedule, the engine's collectives behind them, and what a rank holds at the moments
that can be its fullest, in which not everything is alive at once.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.communication import collective_bytes
from autopar.cost.forms import FORWARD, Forms
from autopar.cost.hardware import Hardware
from autopar.cost.polynomials import Array, Polynomials
from autopar.cost.regime import Regime
from autopar.cost.schedule import SPLIT, Schedule, occupancies, schedule
from autopar.cost.search import Option
from autopar.cost.timeline import Timeline, Times, simulate
from autopar.cost.work import Work, axes_of, points_of, times_of

Kinds = dict[str, float]
WAITING = ("bubble", "pp")


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends along an axis in a step, in collectives of one kind; ``inside``: a node's links alone."""

    axis: str
    collective: str
    bytes: float
    inside: bool


@dataclass(frozen=True)
class Rehearsal:
    """A step as it is predicted to run.

    Args:
        option: the candidate with the seconds and bytes that were found here.
        timeline: forwards and backwards of every rank of the pipeline.
        gradients, optimizer: seconds that follow, on each of them.
        memory: bytes by kind of each, at its fullest moment.
        traffic: what one rank sends in a step.
    """

    option: Option
    timeline: Timeline
    gradients: tuple[float, ...]
    optimizer: tuple[float, ...]
    memory: tuple[Kinds, ...]
    traffic: tuple[Sent, ...] = ()


def rehearse(forms: Forms, hardware: Hardware, option: Option, regime: Regime, positions: int) -> Rehearsal:
    """Simulate one option of a family. ``positions``: of a row."""
    return _Step(forms, hardware, option, regime, positions).rehearsal()


class _Step:
    """One option. Stages are those of its schedule; a rank of the pipeline stands for all that differ in other axes."""

    def __init__(self, forms: Forms, hardware: Hardware, option: Option, regime: Regime, positions: int) -> None:
        self.option, self.hardware, self.regime, self.forms = option, hardware, regime, forms
        self.pp, self.m = option.sizes["pp"], option.microbatches
        table = option.candidates(positions)
        self.points = points_of(table)
        self.times = times_of(forms, hardware, table)
        names = ("again", "alone" if option.sizes["tp"] == 1 else "transient", "sent")
        self.extra = [Polynomials.of([u.unit.activations[n] for n in names])(self.points)[:, 0] for u in forms.units]
        self.schedule: Schedule = schedule(option.schedule if self.pp > 1 else "1f1b", self.pp, option.virtual, self.m)
        counts: Array = forms.stages(self.pp * option.virtual, 1, cuts=regime.cuts)
        units = np.array([np.sum([counts[s] for s in self.schedule.stages_of(r)], axis=0) for r in range(self.pp)])
        self.stages, self.ranks = (Work(forms, hardware, table, regime, self.times, c) for c in (counts, units))

    def rehearsal(self) -> Rehearsal:
        """All of it."""
        forward, backward, sent = self._stages()
        half = tuple(b / 2 for b in backward)
        send = float(self.stages.send()[0]) if self.pp > 1 else 0.0
        line = simulate(self.schedule, Times(tuple(forward), half, half, ((send, send),) * (len(forward) - 1)))
        gradients = _listed(self.ranks.gradients(self.ranks.compute()), self.pp)
        updates = _listed(self.ranks.update(), self.pp)
        memory = tuple(self._memory(r) for r in range(self.pp))
        priced = self._priced(line, sent, gradients, updates, memory)
        return Rehearsal(priced, line, gradients, updates, memory, tuple(self._traffic(0)))

    def _priced(
        self, line: Timeline, sent: Mapping[str, Sequence[float]], gradients: tuple[float, ...],
        updates: tuple[float, ...], memory: tuple[Kinds, ...],
    ) -> Option:  # fmt: skip
        """The option with the seconds and bytes of the slowest and of the fullest rank."""
        ends = [g + u for g, u in zip(gradients, updates)]
        last = int(np.argmax(ends))
        work = [sum(s.end - s.start for s in spans) for spans in line.spans]
        slow = int(np.argmax(work))
        shown = {a: self.m * sum(s[i] for i in self.schedule.stages_of(slow)) for a, s in sent.items()}
        own = work[slow] - sum(shown.values())
        shown["dp"] = shown.get("dp", 0.0) + gradients[last]
        return replace(
            self.option, seconds=line.seconds + ends[last], compute=own, bubble=line.seconds - work[slow],
            optimizer=updates[last], exposed={a: s for a, s in shown.items() if s > 0},
            memory=max(memory, key=lambda kinds: sum(kinds.values())), host=float(self.ranks.hosted().max()),
        )  # fmt: skip

    def _stages(self) -> tuple[list[float], list[float], dict[str, list[float]]]:
        """Seconds of a microbatch on each stage: forward, backward, and of both what no compute hides, by axis."""
        compute = self.stages.compute()
        sent = self.stages.messages()
        own, gathers = sent.get("dp", (np.zeros(1), np.zeros(1))), self.stages.gathers(compute)
        sent["dp"] = own[0] + gathers[0], own[1] + gathers[1]
        count = len(self.schedule.placement)
        both = [_listed(compute[way] + sum(s[way] for s in sent.values()), count) for way in (0, 1)]
        return list(both[0]), list(both[1]), {a: list(_listed(s[0] + s[1], count)) for a, s in sent.items()}

    def _traffic(self, rank: int) -> Iterator[Sent]:
        """What a rank sends in a step: conversions, gradients and parameters, keys and values, and between stages."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        work, full = self.ranks, self.option.recompute == "full"
        for count, inner, unit in zip(work.counts[rank], work.inner[rank], self.forms.units):
            messages = unit.unit.messages
            whole = Polynomials.of([m.bytes for m in messages])(self.points) if messages else np.zeros((0, 1))
            for message, bytes_ in zip(messages, whole):
                times = 1 if message.given else self.m
                calls = float(count + inner * (full and message.when == FORWARD)) * message.calls * times
                ways = message.part[0] if message.part else self.option.sizes[message.axis]
                sent = float(collective_bytes(message.collective, float(bytes_[0]), ways))
                found[message.axis, message.collective] += calls * sent
        for collective, times, width, blocks in self._data():
            for group, elements in work.elements(work.inner if blocks else None).items():
                axes = "+".join(a for a in axes_of(group) if self.option.sizes[a] > 1)
                total, share = float(elements[rank, 0]) * width, float(work.share(group)[0])
                found[axes, collective] += times * float(collective_bytes(collective, total, share))
                copies = float(work.ways(group)[0]) / share
                if collective == "reduce_scatter" and copies > 1:
                    found[axes, "all_reduce"] += times * float(collective_bytes("all_reduce", total / share, copies))
        for axis, collective, bytes_ in self._near(rank):
            found[axis, collective] += self.m * bytes_
        for (axis, collective), bytes_ in found.items():
            if bytes_ > 0:
                parts = axis.split("+")
                reach = max(float(work.links.strides[a][0]) * self.option.sizes[a] for a in parts)
                yield Sent(axis, collective, bytes_, reach <= self.hardware.node)

    def _data(self) -> Iterator[tuple[str, int, int, bool]]:
        """(collective, times in a step, bytes an element, of blocks alone) of the engine."""
        zero, m, r = self.option.zero, self.m, self.regime
        if zero == 0:
            yield "all_reduce", 1, r.reduce_width, False
            return
        yield "all_gather", m if zero == 3 else 1, r.compute_width, False
        if zero == 3:
            yield "all_gather", m, r.compute_width, True
        yield "reduce_scatter", m if zero > 1 else 1, r.reduce_width, False

    def _near(self, rank: int) -> Iterator[tuple[str, str, float]]:
        """(axis, what, bytes of a microbatch) of the ring or Ulysses, and of messages between stages."""
        cp, ulysses = self.option.sizes["cp"], self.option.context == "ulysses"
        ways = self.ranks.exchanged() if ulysses else self.ranks.turned()
        kind = "all_to_all" if ulysses else "all_gather"
        total = sum(float(w[rank, 0]) for w in ways)
        yield "cp", "all_to_all" if ulysses else "ring", float(collective_bytes(kind, total, cp))
        if self.pp > 1:
            yield "pp", "send", 2 * self.option.virtual * max(float(np.ravel(t.hidden)[0]) for t in self.times)

    def _groups(self, rank: int) -> Iterator[tuple[str, Array]]:
        """Elements of each unit on a rank, all its calls, by the data axes over which gradients are summed."""
        every = sorted({g for t in self.times for g in t.parameters})
        for group in every:
            each = np.array([float(np.ravel(t.parameters.get(group, 0.0))[0]) for t in self.times])
            each[-1] -= float(self.ranks.tied[0]) if group == max(every, key=len) else 0.0
            yield group, self.ranks.counts[rank] * each

    def _memory(self, rank: int) -> Kinds:
        """Bytes by kind at the fullest moment of a rank."""
        units, option = self.ranks.counts[rank], self.option
        states = {kind: float(np.broadcast_to(v, (self.pp, 1))[rank, 0]) for kind, v in self.ranks.states().items()}
        elements = sum(float(np.sum(rows)) for _, rows in self._groups(rank))
        whole = states["gradients"] if option.zero > 1 else elements * self.regime.widths.gradient
        gathered, largest = self._gathered(rank)
        held = {**states, "gradients": 0.0, "gathered": gathered}
        each = [float(np.ravel(t.activations[option.recompute])[0]) for t in self.times]
        if option.recompute == "selective" and option.sizes["tp"] == 1:
            each = [e - float(x[2]) for e, x in zip(each, self.extra)]
        received = float(np.ravel(self.times[0].hidden)[0]) if self.schedule.stages_of(rank)[0] else 0.0
        one = float(units @ each) + received
        most = max(sum(moment) / len(moment) for moment in occupancies(self.schedule, rank))
        before, end = whole if self.m > most else 0.0, len(self.times) - 1
        rows = float(np.broadcast_to(self.ranks.dispatches(), (self.pp, 1))[rank, 0])
        found = []
        for at in self._tops(units):
            block, behind = 0 < at < end, at != end and bool(units[-1])
            again, moment = map(float, self.extra[at][:2])
            inside = {"none": 0.0, "selective": again, "full": float(np.ravel(self.times[at].activations["none"])[0])}
            work = moment + (inside[option.recompute] + rows if block else 0.0)
            found.append({
                **held, "gathered": gathered + largest * block, "workspace": work,
                "gradients": max(before, self._own(end) if behind else 0.0),
                "activations": most * one - (each[-1] if behind else 0.0),
            })  # fmt: skip
            if self.m > 1:
                kept = max(most - 1, 0) * one
                found.append({**held, "gradients": whole, "activations": kept, "workspace": work})
        first = int(np.flatnonzero(units)[0])
        kept = max(most - 1, 0) * one + each[first]
        found.append({**held, "gradients": whole, "activations": kept, "workspace": float(self.extra[first][1])})
        fullest = max(found, key=lambda kinds: sum(kinds.values()))
        return {**fullest, "workspace": fullest["workspace"] + self.regime.reserve}

    def _gathered(self, rank: int) -> tuple[float, float]:
        """Bytes of the copies that a rank computes from; of the largest one, which stage 3 holds twice for a moment.

        Stage 3 keeps what stands before and behind the blocks, and one block of each group.
        """
        width, third, total, most = self.regime.compute_width, self.option.zero == 3, 0.0, 0.0
        for group, rows in self._groups(rank):
            if float(self.ranks.ways(group)[0]) > 1 or width != self.regime.widths.parameter:
                calls = self.ranks.inner[rank]
                block = float(np.max(np.divide(rows, calls, out=np.zeros(len(rows)), where=calls > 0)))
                kept = float(np.sum(rows[calls == 0])) + block
                total += (kept if third else float(np.sum(rows))) * width
                most = max(most, block * width * third)
        return total, most

    def _own(self, unit: int) -> float:
        return float(self.times[unit].weight[0]) * self.regime.widths.gradient

    def _tops(self, units: Array) -> list[int]:
        """The units in whose backward most of the activations are still there: the last, and the last block."""
        held = [int(i) for i in np.flatnonzero(units)]
        blocks = [i for i in held if 0 < i < len(units) - 1]
        return list(dict.fromkeys([held[-1], *blocks[-1:]]))


def _listed(values: Array, count: int) -> tuple[float, ...]:
    """Values of ``count`` ranks or stages, [count or 1, 1], one by one."""
    return tuple(float(v) for v in np.broadcast_to(values, (count, 1))[:, 0])


__all__ = ["SPLIT", "Rehearsal", "rehearse"]
