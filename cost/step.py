"""Time and memory of a step for many candidates at once: units on stages, microbatches, gradients, optimizer.

A rank of a pipeline runs (m - 1) microbatches at the pace of the slowest stage; filling and draining take one more of
every stage (arXiv:1811.06965; arXiv:2104.04473, section 2.2), over v where each rank holds v stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from autopar.cost.candidates import SCHEDULES, Candidates
from autopar.cost.forms import BACKWARD, FORWARD, POLICIES, Forms, UnitTimes
from autopar.cost.hardware import Hardware
from autopar.cost.polynomials import Array
from autopar.cost.regime import Regime
from autopar.cost.work import Work, times_of

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "workspace")


@dataclass(frozen=True)
class Steps:
    """The price of each candidate. Seconds and bytes of the fullest rank.

    Args:
        seconds: of the step. compute: of it, one rank's own work, recomputation included. bubble: waiting for others.
        exposed: by axis, communication that nothing hides. optimizer: the update.
        memory: by kind, of the rank that holds most. flops: of the model, all ranks, recomputation not counted.
        host: of the rank that has most in host memory.
    """

    seconds: Array
    compute: Array
    bubble: Array
    exposed: dict[str, Array]
    optimizer: Array
    memory: dict[str, Array]
    flops: Array
    hardware_flops: Array
    host: Array

    @property
    def peak(self) -> Array:
        """Bytes of the fullest rank."""
        return np.sum(list(self.memory.values()), axis=0)


def steps(forms: Forms, hardware: Hardware, candidates: Candidates, regime: Regime) -> Steps:
    """Price every candidate of one family and one placement, given as columns of equal length."""
    parts = []
    keys = np.stack([candidates.sizes["pp"], candidates.virtual, candidates.schedule == SCHEDULES.index("zbv")])
    for key in np.unique(keys, axis=1).T:
        inside = np.flatnonzero((keys == key[:, None]).all(axis=0))
        parts.append((inside, Group(forms, hardware, candidates.take(inside), regime).steps()))
    return _joined(parts, candidates.shape[0])


def _joined(parts: list[tuple[Any, Steps]], count: int) -> Steps:
    def join(pick: Any) -> Array:
        out = np.zeros(count)
        for where, part in parts:
            out[where] = pick(part)
        return out

    axes = sorted({a for _, p in parts for a in p.exposed})
    names = ("seconds", "compute", "bubble", "optimizer", "flops", "hardware_flops", "host")
    plain = {n: join(lambda p, n=n: getattr(p, n)) for n in names}
    exposed = {a: join(lambda p, a=a: p.exposed.get(a, 0.0)) for a in axes}
    memory = {k: join(lambda p, k=k: p.memory[k]) for k in KINDS}
    return Steps(exposed=exposed, memory=memory, **plain)


class Group(Work):
    """Candidates with equally many stages, equally placed, whose columns broadcast.

    The rows of its results are ranks of the pipeline, of which equal ones are one, the first of them.
    """

    def __init__(
        self, forms: Forms, hardware: Hardware, candidates: Candidates, regime: Regime,
        times: Sequence[UnitTimes] | None = None,
    ) -> None:  # fmt: skip
        self.pp, self.virtual = int(candidates.sizes["pp"].flat[0]), int(candidates.virtual.flat[0])
        v = int(candidates.schedule.flat[0]) == SCHEDULES.index("zbv")
        every = forms.stages(self.pp, self.virtual, v, regime.cuts)
        counts, self.first, self.ranks = np.unique(every, axis=0, return_index=True, return_counts=True)
        times = times or times_of(forms, hardware, candidates)
        super().__init__(forms, hardware, candidates, regime, times, counts)

    def mean(self, values: Array) -> Array:
        """Sum over all ranks of the pipeline of what each takes."""
        return np.tensordot(self.ranks, values, axes=1)

    def totals(self) -> tuple[Array, Array]:
        """(seconds, bytes of the fullest rank)."""
        own, exposed, late = self._work()
        each = own + sum(exposed.values())
        seconds = self.c.microbatches * each.max(axis=0) + self._bubble(each) + self._sends(each) + late
        return seconds + self.update().max(axis=0), reduce(np.add, self._held().values()).max(axis=0)

    def steps(self) -> Steps:
        """The price of all, by its parts."""
        own, exposed, late = self._work()
        each = own + sum(exposed.values())
        slowest = each.argmax(axis=0)[None]
        m = self.c.microbatches

        def of_slowest(rows: Array) -> Array:
            return np.take_along_axis(np.broadcast_to(rows, each.shape), slowest, axis=0)[0]

        bubble, update = self._bubble(each), self.update().max(axis=0)
        shown = {axis: m * of_slowest(rows) for axis, rows in exposed.items()}
        shown["dp"], shown["pp"] = shown["dp"] + late, self._sends(each)
        memory = self._memory()
        over = reduce(np.add, memory.values()) > self.hardware.memory_bytes
        seconds = m * (each.max(axis=0) + self.regime.retries * over) + bubble + shown["pp"] + late + update
        host = self.hosted().max(axis=0)
        return Steps(seconds, m * of_slowest(own), bubble, shown, update, memory, *self._flops(), host)

    def _work(self) -> tuple[Array, dict[str, Array], Array]:
        """Seconds of one microbatch on each rank: its own, and of communication that nothing hides, by axis.

        Last, what follows the last microbatch on the slowest rank.
        """
        compute = self.compute()
        exposed = {axis: ways[0] + ways[1] for axis, ways in self.messages().items()}
        gathers = self.gathers(compute)
        exposed["dp"] = exposed.get("dp", np.zeros(1)) + gathers[0] + gathers[1]
        return compute[0] + compute[1], exposed, self.gradients(compute).max(axis=0)

    def _flops(self) -> tuple[Array, Array]:
        """Of the model on all ranks, and with what full recomputation repeats."""
        copies = self.c.microbatches * reduce(np.multiply, self.c.sizes.values()) / self.pp
        forward, backward = (self.mean(self.on(lambda t, i=i: t.flops[i])) * copies for i in (0, 1))
        return forward + backward, forward * (1 + (self.c.recompute == 2)) + backward

    def _bubble(self, each: Array) -> Array:
        """Seconds of waiting while the pipeline fills and drains, as ``cost.timeline`` simulates equal stages.

        Schedules that split the backward put W where others wait: at once that of the first microbatch, and one more
        with each that follows, until the pipeline is full. Interleaving asks for as many microbatches as ranks.
        """
        if self.pp == 1:
            return np.zeros(1)
        p, m = self.pp, self.c.microbatches
        fill = (self.mean(each) - each.max(axis=0)) / self.virtual
        forward, weight = self.mean(self.on(lambda t: t.forward)) / p, self.mean(self.on(lambda t: t.backward)) / p / 2
        whole = np.maximum(forward + 2 * weight, 1e-30)
        hidden = weight + np.minimum(forward, weight) * np.minimum(m - 1, p - 1) / (p - 1)
        late = 1 + (self.virtual - 1) * np.maximum(0, p - m) / (p - 1)
        ends = np.maximum(forward, weight) + np.maximum(0, forward - weight) * (p - 2) / (p - 1)
        left: list[Any] = [1.0, 1.0, late, 1 - hidden / whole, ends / whole]
        return fill * np.choose(self.c.schedule.astype(int), left)

    def _sends(self, each: Array) -> Array:
        """Seconds that messages between stages add to a step."""
        if self.pp == 1:
            return np.zeros(1)
        m, send = self.c.microbatches, self.send()
        slack = (m - 1) * (each.max(axis=0) - self.mean(each) / self.pp) / np.maximum(send, 1e-30)
        return send * np.choose(self.c.schedule.astype(int), hops(self.pp, self.virtual, m, slack))

    def _memory(self) -> dict[str, Array]:
        """Bytes by kind of the rank that holds most."""
        every = self._held()
        total = reduce(np.add, every.values())
        at = total.argmax(axis=0)[None]
        return {k: np.take_along_axis(np.broadcast_to(v, total.shape), at, axis=0)[0] for k, v in every.items()}

    def _held(self) -> dict[str, Array]:
        """Bytes of each rank by kind."""
        r = self.regime
        held = {**self.states(), "gathered": self._gathered()}
        routes = self.counts @ np.array([len(t.dispatches) > 0 for t in self.times], dtype=float)
        work = self._moment() + r.reserve + r.grouped * self.ranked(routes > 0)
        work = work + (0.0 if r.rows else self.dispatches())
        if r.copies:
            work = work + r.copies * self.matrices()
        if r.moments:
            work = work + self.fullest(lambda t: t.moment)
        return {**held, "activations": self._activations(), "workspace": work}

    def _moment(self) -> Array:
        """What a step needs besides, at the fullest of three moments: in the last unit, in a block, among experts.

        In the backward of the last unit: gradients of its widest product's result and input; where rows were gathered,
        they and their gradient are there whole. In a block's nothing of the last unit is left, and what recomputation
        made is: the gradients of its result and of its two widest products' results, or, when those two let go of what
        they kept, rows that were gathered again, and their gradient. In a forward, rows go to experts and come back
        while neither has begun. Gradients that came from the next stage or went to the one before stay until others
        take their names (Megatron-LM ``pipeline_parallel/schedules.py``).
        """
        r, (result, taken) = self.regime, self.times[-1].rows
        here = self.ranked(self.counts[:, -1]) > 0
        tp = np.where(self.forms.family.sequence, self.c.sizes["tp"], 1.0)
        ends = self.spread(r.workspace * result) + r.inputs * self.spread(taken) * (1 + (tp > 1) * (1 + 1 / tp))
        blocks = self.times[1:-1]
        wide, hidden = self.most([t.rows[0] for t in blocks]), self.most([t.hidden for t in blocks])
        kept = self.most([t.activations["none"] for t in blocks])
        some = self.most([t.scores for t in blocks]) if r.core else kept
        again = np.where(self.c.recompute == 2, kept, np.where(self.c.recompute == 1, some, 0.0))
        back = np.zeros(1)
        if r.inputs:
            back = np.maximum(hidden + 2 * r.inputs * wide, (tp > 1) * (2 * (tp + 1) * hidden - r.inputs * wide))
        rows = self.dispatches()
        rows = r.rows * rows + (rows > 0) * (r.results + r.released * ~here) * hidden
        inside, left = again + np.maximum(back, rows), self.spread(self.times[-1].activations["none"])
        after = r.released * self.ranked(self.first > 0)
        return np.where(here, np.maximum(ends, inside - left), inside) + after * hidden

    def _gathered(self) -> Array:
        """Copies that a rank computes from: of all its units, at stage 3 of two of them.

        With ``Regime.moments``, of two blocks and of all that is no block.
        """
        ours, out, apart = self.regime.engine, np.zeros(1), self.elements(self.counts - self.inner)
        for group, elements in self.elements().items():
            two = elements * self.ranked(np.minimum(1.0, 2.0 / np.maximum(1.0, self.counts.sum(axis=1))))
            if self.regime.moments:
                block = self.fullest(lambda t, g=group: t.parameters.get(g, 0.0), self.inner)
                two = apart[group] + 2 * block
            out = out + np.where(self.c.zero == 3, two, elements if ours else 0.0) * self.regime.compute_width
        return out

    def _activations(self) -> Array:
        """Kept by the microbatches in flight.

        A stage's result is counted for its input, as equal; the first one has that of its first unit, too, and the last
        one needs its result.
        """
        policies = [self.on(lambda t, p=p: t.activations[p]) for p in POLICIES]
        if self.regime.core:
            policies[1] = policies[0] - self.on(lambda t: t.scores)
        rings = self.regime.ring * self.on(lambda t: t.heads[0]) * (self.c.sizes["cp"] > 1) * (self.c.recompute < 2)
        ends = (self.counts[:, 0] > 0) * 1.0 - (self.counts[:, -1] > 0)
        sent = self.regime.released * self.ranked(ends) * self.most([t.hidden for t in self.times[1:-1]])
        each = np.choose(self.c.recompute.astype(int)[None], policies) + rings - sent + self._late()
        if self.regime.moments:  # what a stage receives is its own, too
            each = each + np.where(self.ranked(self.first) > 0, self.spread(self.times[0].hidden), 0.0)
        return each * self._in_flight()

    def _late(self) -> Array:
        """What was gathered and is not let go of: where the host runs ahead, memory waits for other streams."""
        if not self.regime.recorded:
            return np.zeros(1)
        ahead, device = reduce(np.add, self._ahead()), reduce(np.add, self._device())
        for way in (FORWARD, BACKWARD):
            device = device + self.on(lambda t, way=way: t.messages.get(("tp", way), 0.0)) * (
                self.links.nodes("tp") == 1
            )
        gathered = self.on(lambda t: t.gathered) * (1 - 1 / self.c.sizes["tp"])
        return self.regime.recorded * gathered * (ahead < device) * (self.c.recompute < 2)

    def _in_flight(self) -> Array:
        """Microbatches whose activations a rank holds at its fullest (arXiv:2205.05198, appendix B and C).

        As ``schedule.occupancies`` counts them: who splits the backward keeps as many until W on every rank; a rank of
        v stages runs ahead of the next one by two stages of v.
        """
        m, rank, p, v = self.c.microbatches, self.ranked(self.first), self.pp, self.virtual
        every, most = m + 0.0 * rank, np.minimum(m, p) + 0.0 * rank
        laps = np.minimum(m, p + (p - 1 - 2 * rank) / v)
        return np.choose(self.c.schedule.astype(int)[None], [np.minimum(m, p - rank), every, laps, most, most])


def hops(p: int, v: int, m: Array, slack: Array) -> list[Array]:
    """Messages between stages for which a step of each of ``SCHEDULES`` waits, as ``cost.timeline`` simulates it.

    Messages travel while stages compute; one way there and back is in the filling and draining. 1F1B has no more
    microbatches on their way than stages, and waits in each round of them, less what all wait for a slower stage:
    ``slack``, in messages. Splitting the backward leaves work for that time, but in the first round. Interleaved rounds
    of as many microbatches as ranks pass every stage.
    """
    once, last = 2.0 * (p - 1), (m - 1) % p + 1
    rounds = np.maximum(once, once * np.ceil(m / p) + 2 * np.maximum(0, last - 2) - slack)
    laps = np.where((m % p == 0) | (m < p), 2.0 * (p * v - 1), once)
    split, back = once + 2 * np.clip(m - 2, 0, p - 1), np.where(m >= 2 * p, 5 * p - 7, 4 * (p - 1))
    return [rounds, once + 0 * m, laps, split, back]
