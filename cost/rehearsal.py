"""One candidate again, closer: every action of its schedule in time, and memory moment by moment.

A search prices thousands of candidates with sums that hold for all of them. Here one is simulated: each stage's
microbatches in the order of its schedule, the engine's collectives behind them, and what a rank holds at the moments
that can be its fullest, in which not everything is alive at once.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from autopar.cost.communication import collective_bytes
from autopar.cost.forms import BACKWARD, FORWARD, Forms, UnitTimes
from autopar.cost.hardware import Hardware
from autopar.cost.links import Links, collective_seconds
from autopar.cost.polynomials import Array, Polynomials
from autopar.cost.regime import Regime
from autopar.cost.schedule import SPLIT, Schedule, occupancies, schedule
from autopar.cost.search import Option
from autopar.cost.timeline import Timeline, Times, simulate

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
        sizes = {a: np.array([float(n)]) for a, n in option.sizes.items()}
        points = self.points = {
            **sizes,
            "b": np.array([float(option.rows)]),
            "s": np.array([positions / option.sizes["cp"]]),
        }
        self.links = Links.placed(hardware, sizes, option.order)
        self.times = [u.times(points, self.links, hardware) for u in forms.units]
        alone = option.sizes["tp"] == 1
        names = ("again", "alone" if alone else "transient", "sent")
        self.extra = [Polynomials.of([u.unit.activations[n] for n in names])(points)[:, 0] for u in forms.units]
        self.launches = [sum(n for n, _ in u.unit.kernels) for u in forms.units]
        self.schedule: Schedule = schedule(option.schedule if self.pp > 1 else "1f1b", self.pp, option.virtual, self.m)
        self.counts: Array = forms.stages(self.pp * option.virtual, 1, even=regime.even)
        self.tied = forms.family.tied != 0 and self.pp == 1
        tied = Polynomials.of([forms.family.tied])(points)[0] if self.tied else np.zeros(1)
        self.twice = float(tied[0])

    def rehearsal(self) -> Rehearsal:
        """All of it."""
        forward, backward = self._stages()
        half = [b / 2 for b in backward]
        send = self._send()
        times = Times(tuple(forward), tuple(half), tuple(half), ((send, send),) * (len(forward) - 1))
        line = simulate(self.schedule, times)
        gradients = tuple(self._gradients(r) for r in range(self.pp))
        updates = tuple(self._update(r) for r in range(self.pp))
        memory = tuple(self._memory(r) for r in range(self.pp))
        priced = self._priced(line, gradients, updates, memory)
        return Rehearsal(priced, line, gradients, updates, memory, tuple(self._traffic(0)))

    def _priced(
        self, line: Timeline, gradients: tuple[float, ...], updates: tuple[float, ...], memory: tuple[Kinds, ...]
    ) -> Option:
        """The option with the seconds and bytes of the slowest and of the fullest rank."""
        ends = [g + u for g, u in zip(gradients, updates)]
        last = int(np.argmax(ends))
        work = [sum(s.end - s.start for s in spans) for spans in line.spans]
        slow = int(np.argmax(work))
        sent = {a: self.m * s for a, s in self._sent(slow).items() if s > 0}
        sent["dp"] = sent.get("dp", 0.0) + gradients[last]
        return replace(
            self.option, seconds=line.seconds + ends[last], compute=work[slow] - sum(sent.values()) + gradients[last],
            bubble=line.seconds - work[slow], optimizer=updates[last], exposed={a: s for a, s in sent.items() if s > 0},
            memory=max(memory, key=lambda kinds: sum(kinds.values())),
        )  # fmt: skip

    def _units(self, rank: int) -> Array:
        """Calls of each unit on a rank."""
        return np.sum([self.counts[s] for s in self.schedule.stages_of(rank)], axis=0)

    def _stages(self) -> tuple[list[float], list[float]]:
        """Seconds of a microbatch on each stage, forward and backward, its own messages included."""
        host, full, some = self.regime.host + self.hardware.host, *(self.option.recompute == p for p in _POLICIES)
        out: tuple[list[float], list[float]] = ([], [])
        for counts in self.counts:
            one, two = 0.0, 0.0
            for i, t in enumerate(self.times):
                inner = 0 < i < len(self.times) - 1
                first = float(t.forward[0]) + host * self.launches[i] + _messages(t, FORWARD)
                again = first if full else float(t.again[0]) + host * self.launches[i] if some else 0.0
                one += counts[i] * first
                back = float(t.backward[0]) + 2 * host * self.launches[i] + _messages(t, BACKWARD)
                two += counts[i] * (back + inner * again)
            out[0].append(one)
            out[1].append(two)
        ranks = self.schedule.placement
        for s, rank in enumerate(ranks):
            share = float(np.sum(self.counts[s]) / max(1.0, np.sum(self._units(rank))))
            context, gather = self._context(rank), self._gathers(rank)
            out[0][s] += share * (context / 3 + gather / 3)
            out[1][s] += share * (context + gather) * 2 / 3
        return out

    def _sent(self, rank: int) -> dict[str, float]:
        """Seconds of a microbatch's messages on a rank, by axis."""
        full = self.option.recompute == "full"
        out: dict[str, float] = {}
        for count, t in zip(self._units(rank), self.times):
            for (axis, when), seconds in t.messages.items():
                again = 1 + (full and when == FORWARD)
                out[axis] = out.get(axis, 0.0) + float(count) * again * float(np.ravel(seconds)[0])
        out["cp"] = out.get("cp", 0.0) + self._context(rank)
        out["dp"] = out.get("dp", 0.0) + self._gathers(rank)
        return out

    def _traffic(self, rank: int) -> Iterator[Sent]:
        """What a rank sends in a step: conversions, gradients and parameters, keys and values, and between stages."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for count, unit in zip(self._units(rank), self.forms.units):
            messages = unit.unit.messages
            whole = Polynomials.of([m.bytes for m in messages])(self.points) if messages else np.zeros((0, 1))
            for message, bytes_ in zip(messages, whole):
                ways = self.option.sizes.get(message.axis, 1)
                again = 1 + (self.option.recompute == "full" and message.when == FORWARD)
                sent = float(collective_bytes(message.collective, float(bytes_[0]), ways))
                found[message.axis, message.collective] += float(count) * message.calls * self.m * again * sent
        for group, rows in self._groups(rank).items():
            ways, share = self._ways(group)
            axes = "+".join(a for a in (*filter(None, group.split("+")), "cp") if self.option.sizes[a] > 1)
            elements = sum(c * n for c, n in rows)
            for collective, times, width in self._data():
                found[axes, collective] += times * float(collective_bytes(collective, elements * width, share))
        for axis, collective, bytes_ in self._near(rank):
            found[axis, collective] += self.m * bytes_
        for (axis, collective), bytes_ in found.items():
            if bytes_ > 0:
                parts = axis.split("+")
                reach = max(float(self.links.strides[a][0]) * self.option.sizes[a] for a in parts)
                yield Sent(axis, collective, bytes_, reach <= self.hardware.node)

    def _data(self) -> Iterator[tuple[str, int, int]]:
        """(collective, times in a step, bytes an element) of the engine."""
        zero, m, r = self.option.zero, self.m, self.regime
        if zero == 0:
            yield "all_reduce", 1, r.reduce_width
            return
        yield "all_gather", 2 * m if zero == 3 else 1, r.compute_width
        yield "reduce_scatter", m if zero > 1 else 1, r.reduce_width

    def _near(self, rank: int) -> Iterator[tuple[str, str, float]]:
        """(axis, what, bytes of a microbatch) of the ring or Ulysses, and of messages between stages."""
        cp, units = self.option.sizes["cp"], self._units(rank)
        queries, keys = (float(sum(c * t.heads[i][0] for c, t in zip(units, self.times))) for i in (0, 1))
        if self.option.context == "ulysses":
            yield "cp", "all_to_all", float(collective_bytes("all_to_all", 2 * (2 * queries + keys) * cp, cp))
        elif cp > 1:
            yield "cp", "ring", 3 * (cp - 1) * keys
        if self.pp > 1:
            yield "pp", "send", 2 * self.option.virtual * max(float(np.ravel(t.hidden)[0]) for t in self.times)

    def _context(self, rank: int) -> float:
        """Ring or Ulysses of a microbatch, forward and backward, as ``cost.step`` prices them."""
        cp, stride = self.option.sizes["cp"], self.links.strides["cp"]
        if cp == 1:
            return 0.0
        units = self._units(rank)
        queries, keys = (float(sum(c * t.heads[i][0] for c, t in zip(units, self.times))) for i in (0, 1))
        if self.option.context == "ulysses":
            return _one(self.hardware, "all_to_all", 2 * (2 * queries + keys) * cp, cp, stride)
        work = float(sum(c * t.attention[0] for c, t in zip(units, self.times)))
        rate = self.hardware.memory_bandwidth * self.hardware.memory_efficiency
        ring = 3 * _one(self.hardware, "all_gather", keys * cp, cp, stride)
        return max(0.0, ring - self._overlap * work) + (cp - 1) * 5 * queries / rate

    @property
    def _overlap(self) -> float:
        return min(self.regime.overlap, self.hardware.overlap)

    def _send(self) -> float:
        """Seconds of a message between neighbours."""
        if self.pp == 1:
            return 0.0
        hidden = max(float(np.ravel(t.hidden)[0]) for t in self.times)
        tier = self.hardware.outer if self.links.strides["pp"][0] >= self.hardware.node else self.hardware.inner
        return tier.base + tier.latency + hidden / tier.rate("p2p")

    def _groups(self, rank: int) -> Mapping[str, list[tuple[float, float]]]:
        """(calls, elements of a call) of each unit, by the data axes over which gradients are summed."""
        out: dict[str, list[tuple[float, float]]] = {}
        for i, (count, t) in enumerate(zip(self._units(rank), self.times)):
            for group, elements in t.parameters.items():
                own = float(np.ravel(elements)[0]) - (self.twice if i == len(self.times) - 1 else 0.0)
                if count:
                    out.setdefault(group, []).append((float(count), own))
        return out

    def _ways(self, group: str) -> tuple[int, int]:
        """(ranks that sum a group's gradients, ranks that share out one copy)."""
        ways = self.option.sizes["cp"] * prod(self.option.sizes[a] for a in group.split("+") if a)
        shard = self.option.shard
        return ways, shard if 0 < shard < ways else ways

    def _moved(self, rank: int, collective: str, width: int, inner: bool = False) -> float:
        """Seconds of one collective for each unit, with the copies into and out of its buffer."""
        total = 0.0
        bandwidth = self.hardware.memory_bandwidth * self.hardware.memory_efficiency
        for group, rows in self._groups(rank).items():
            ways, share = self._ways(group)
            if ways == 1:
                continue
            stride = min(float(self.links.strides[a][0]) for a in (*filter(None, group.split("+")), "cp"))
            for count, elements in rows[1:-1] if inner and len(rows) > 2 else rows:
                seconds = _one(self.hardware, collective, elements * width, share, np.array([stride]))
                if share < ways and collective != "all_gather":
                    part = elements * width / share
                    seconds += _one(self.hardware, "all_reduce", part, ways / share, np.array([stride * share]))
                total += count * (seconds + 4 * elements * width / bandwidth + self.hardware.unit)
        return total

    def _gathers(self, rank: int) -> float:
        """Stage 3: gathers of a microbatch and the sums of its gradients; stage 2: the sums."""
        zero, r = self.option.zero, self.regime
        if zero < 2 or (zero == 2 and self.m == 1):
            return 0.0
        total = self._moved(rank, "reduce_scatter", r.reduce_width)
        if zero == 3:
            total += self._moved(rank, "all_gather", r.compute_width)
            total += self._moved(rank, "all_gather", r.compute_width, inner=True)
        return self._exposed(total, rank)

    def _gradients(self, rank: int) -> float:
        """What follows the last backward: sums of gradients at stages 0 and 1, the gather of stages 1 and 2."""
        zero, r = self.option.zero, self.regime
        if zero == 0:
            return self._exposed(self._moved(rank, "all_reduce", r.reduce_width), rank)
        total = self._moved(rank, "all_gather", r.compute_width) if zero < 3 else 0.0
        if zero == 1 or (zero == 2 and self.m == 1):
            total += self._moved(rank, "reduce_scatter", r.reduce_width)
        return self._exposed(total, rank)

    def _exposed(self, seconds: float, rank: int) -> float:
        """What a microbatch's backward does not hide."""
        backward = sum(c * float(t.backward[0]) for c, t in zip(self._units(rank), self.times))
        return max(0.0, seconds - self._overlap * float(backward))

    def _update(self, rank: int) -> float:
        rate = self.hardware.memory_bandwidth * self.hardware.memory_efficiency
        total = 0.0
        for group, rows in self._groups(rank).items():
            share = self._ways(group)[1] if self.option.zero else 1
            total += sum(count * elements for count, elements in rows) / share
        return total * self.regime.update / rate

    def _memory(self, rank: int) -> Kinds:
        """Bytes by kind at the fullest moment of a rank."""
        option, widths = self.option, self.regime.widths
        units = self._units(rank)
        held = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "gathered": 0.0}
        gathered, whole, largest = 0.0, 0.0, 0.0
        for group, rows in self._groups(rank).items():
            ways, share = self._ways(group)
            elements = sum(c * n for c, n in rows)
            own = elements / share if option.zero else elements
            held["parameters"] += own * widths.parameter
            held["optimizer"] += own * widths.optimizer
            whole += (own if option.zero > 1 else elements) * widths.gradient
            if ways > 1 or self.regime.compute_width != widths.parameter:
                inner = [n for _, n in rows[1:-1]] or [0.0]
                kept = elements - sum(c * n for c, n in rows[1:-1]) + max(inner)
                gathered += (kept if option.zero == 3 else elements) * self.regime.compute_width
                largest = max(largest, max(inner) * self.regime.compute_width * (option.zero == 3))
        held["gathered"] = gathered
        each = [float(np.ravel(t.activations[option.recompute])[0]) for t in self.times]
        if option.recompute == "selective" and option.sizes["tp"] == 1:
            each = [e - float(x[2]) for e, x in zip(each, self.extra)]
        one = float(units @ each)
        received = float(np.ravel(self.times[0].hidden)[0]) if self.schedule.stages_of(rank)[0] else 0.0
        one += received
        alive = [sum(moment) / len(moment) for moment in occupancies(self.schedule, rank)]
        most = max(alive)
        before = whole if self.m > most else 0.0
        found = []
        for at in self._tops(units):
            block = 0 < at < len(self.times) - 1
            later = 0.0 if at == len(self.times) - 1 or not units[-1] else each[-1]
            done = 0.0 if at == len(self.times) - 1 or not units[-1] else self._own(len(self.times) - 1)
            again, moment = map(float, self.extra[at][:2])
            inside = {"none": 0.0, "selective": again, "full": float(np.ravel(self.times[at].activations["none"])[0])}
            work = moment + (inside[option.recompute] if block else 0.0)
            found.append({**held, "gathered": gathered + largest * block, "gradients": max(before, done),
                          "activations": most * one - later, "workspace": work})  # fmt: skip
            found.append({**held, "gradients": whole, "activations": max(most - 1, 0) * one, "workspace": work}
                         if self.m > 1 else found[-1])  # fmt: skip
        first = int(np.flatnonzero(units)[0])
        found.append({**held, "gradients": whole, "activations": max(most - 1, 0) * one + each[first],
                      "workspace": float(self.extra[first][1])})  # fmt: skip
        fullest = max(found, key=lambda kinds: sum(kinds.values()))
        return {**fullest, "workspace": fullest["workspace"] + self.regime.reserve}

    def _own(self, unit: int) -> float:
        return float(self.times[unit].weight[0]) * self.regime.widths.gradient

    def _tops(self, units: Array) -> list[int]:
        """The units in whose backward most of the activations are still there: the last, and the last block."""
        held = [int(i) for i in np.flatnonzero(units)]
        blocks = [i for i in held if 0 < i < len(units) - 1]
        return list(dict.fromkeys([held[-1], *blocks[-1:]]))


_POLICIES = ("full", "selective")


def _messages(times: UnitTimes, when: str) -> float:
    return sum(float(np.ravel(s)[0]) for (_, part), s in times.messages.items() if part == when)


def _one(hardware: Hardware, collective: str, whole: float, ways: float, stride: Array) -> float:
    found = collective_seconds(hardware, collective, np.array([whole]), np.array([float(ways)]), stride)
    return float(np.ravel(found)[0])


__all__ = ["SPLIT", "Rehearsal", "rehearse"]
