"""What a microbatch and the engine take on some ranks or stages: the prices that searches and rehearsals share.

A search adds them up for thousands of candidates; a rehearsal (``cost.rehearsal``) puts them into a timeline for one.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from autopar.cost.candidates import Candidates
from autopar.cost.forms import BACKWARD, FORWARD, Forms, UnitTimes
from autopar.cost.hardware import Hardware
from autopar.cost.links import Links, collective_seconds, common, exchange_copies, ring_sums, send_seconds
from autopar.cost.polynomials import Array, Polynomials
from autopar.cost.regime import Regime

HOST_BANDWIDTH = 25e9  # bytes per second between host and device: 80% of PCIe 4.0 x16 (31.5 GB/s)
COPIES = 4  # times an engine moves each byte of a unit's buffer: read and written before a collective, and behind it
Ways = tuple[Array, Array]  # forward and backward


def points_of(c: Candidates) -> dict[str, Array]:
    """Sizes of a microbatch and of its axes as lists; they vary along the first of the columns' dims alone."""
    columns = {**c.sizes, "b": c.rows, "s": c.positions / c.sizes["cp"]}
    shape = np.broadcast_shapes(*(v.shape for v in columns.values()))
    return {n: np.broadcast_to(v, shape).reshape(-1) for n, v in columns.items()}


def times_of(forms: Forms, hardware: Hardware, candidates: Candidates) -> tuple[UnitTimes, ...]:
    """What each unit takes and holds at the candidates' sizes and rows."""
    points = points_of(candidates)
    links = Links.placed(hardware, points, candidates.order)
    return tuple(u.times(points, links, hardware) for u in forms.units)


class Work:
    """Seconds of candidates whose columns broadcast, on the ranks or stages that ``counts`` tells of.

    Args:
        counts: [rows, units], how many calls of each unit a rank or a stage has. times: of each unit, as ``times_of``.

    Results have one dim in front of the columns', for the rows of ``counts``.
    """

    def __init__(
        self, forms: Forms, hardware: Hardware, candidates: Candidates, regime: Regime, times: Sequence[UnitTimes],
        counts: Array,
    ) -> None:  # fmt: skip
        self.forms, self.hardware, self.c, self.regime, self.times = forms, hardware, candidates, regime, times
        self.counts, self.inner = counts, counts.copy()
        self.inner[:, [0, -1]] = 0  # what stands before and behind the blocks neither recomputes nor is gathered twice
        self.links = Links.placed(hardware, candidates.sizes, candidates.order)
        self.base = np.broadcast_shapes(candidates.rows.shape, *(n.shape for n in candidates.sizes.values()))
        self.full, self.selective = candidates.recompute == 2, candidates.recompute == 1
        self.overlap = min(regime.overlap, hardware.overlap)
        self.rate = hardware.memory_bandwidth * hardware.memory_efficiency
        self.tied: Array = np.zeros(1)
        if forms.family.tied != 0 and int(candidates.sizes["pp"].flat[0]) == 1:
            self.tied = self.spread(Polynomials.of([forms.family.tied])(points_of(candidates))[0])

    def spread(self, values: Any) -> Array:
        """[..., points] as columns."""
        values = np.asarray(values)
        points = int(np.prod(self.base))
        return np.broadcast_to(values, (*values.shape[:-1], points)).reshape(*values.shape[:-1], *self.base)

    def ranked(self, values: Any) -> Array:
        """[rows] as columns with rows in front."""
        return np.asarray(values).reshape(-1, *(1 for _ in self.base))

    def on(self, pick: Any, counts: Array | None = None) -> Array:
        """Sum over the units of each row, [rows, ...]."""
        points = (int(np.prod(self.base)),)
        rows = np.array([np.broadcast_to(pick(t), points) for t in self.times])
        return self.spread(np.tensordot(self.counts if counts is None else counts, rows, axes=1))

    def most(self, values: list[Array]) -> Array:
        """The largest of several at each point."""
        return self.spread(reduce(np.maximum, values, np.zeros(1)))

    def fullest(self, pick: Any, counts: Array | None = None) -> Array:
        """The largest of the units that each row has."""
        out: Array = np.zeros(1)
        for calls, unit in zip((self.counts if counts is None else counts).T, self.times):
            out = np.maximum(out, np.where(self.ranked(calls) > 0, self.spread(pick(unit)), 0.0))
        return out

    def compute(self) -> Ways:
        """A rank's own work on a microbatch, what recomputation repeats included.

        The host's work for an op stands beside it (``Hardware.host``), or runs ahead of the device (``Regime.host``),
        which then waits for it.
        """
        device, ahead = self._device(), self._ahead()
        return np.maximum(device[0], ahead[0]), np.maximum(device[1], ahead[1])

    def _device(self) -> Ways:
        """What a rank's device has to do. A backward has about twice as many ops."""
        ops, inner, _ = self._launches()
        forward = self.on(lambda t: t.forward) + self.hardware.host * ops
        backward = self.on(lambda t: t.backward) + 2 * self.hardware.host * ops
        if self.regime.summed:
            backward = backward + self.on(lambda t: t.experts) * self.regime.summed / self.rate
        again = self.on(lambda t: t.attention[0] if self.regime.core else t.again, self.inner)
        again = again + self.hardware.host * inner
        stop = 1.0 if self.regime.early else 0.0
        whole = self.on(lambda t: t.forward - stop * t.tail, self.inner) + self.hardware.host * inner
        return forward, backward + again * self.selective + whole * self.full

    def _ahead(self) -> Ways:
        """What its host has to do for that and for the tensor axis's messages."""
        if not self.regime.host:
            return np.zeros(1), np.zeros(1)
        ops, _, sent = self._launches()
        tp, pp = self.c.sizes["tp"], self.c.sizes["pp"]
        slow = (tp > 1) & (pp > 1) & (pp * self.links.strides["pp"] > self.hardware.node)
        ahead = self.regime.host * (ops + sent / 3) + self.regime.wait * slow * tp * sent / 3
        return ahead, ahead * (2 + self.full)

    def _launches(self) -> tuple[Array, Array, Array]:
        """(ops of a forward, those of blocks alone, collectives of forward and backward) on each row."""
        units = [u.unit for u in self.forms.units]
        ops = np.array([sum(n for n, _ in u.kernels) for u in units], dtype=float)
        sent = np.array([sum(m.calls for m in u.messages) for u in units], dtype=float)
        return self.ranked(self.counts @ ops), self.ranked(self.inner @ ops), self.ranked(self.counts @ sent)

    def messages(self) -> dict[str, Ways]:
        """Seconds of the units' own collectives in a microbatch, by axis.

        Full recomputation repeats a block's forward ones. Of what is sent once in a step, each microbatch has its part.
        """
        out: dict[str, Ways] = {}
        for axis in sorted({axis for t in self.times for axis, _ in (*t.messages, *t.once)}):
            forward, again = (
                self.on(lambda t, a=axis: t.messages.get((a, FORWARD), 0.0), c) for c in (self.counts, self.inner)
            )
            forward = forward + self.on(lambda t, a=axis: t.once.get((a, FORWARD), 0.0)) / self.c.microbatches
            backward = self.on(lambda t, a=axis: t.messages.get((a, BACKWARD), 0.0)) + again * self.full
            out[axis] = self._beside(forward, backward) if axis == "tp" else (forward, backward)
        if np.any(self.c.sizes["cp"] > 1):
            mine, context = out.get("cp", (0.0, 0.0)), self._context()
            out["cp"] = mine[0] + context[0], mine[1] + context[1]
        return out

    def _beside(self, forward: Array, backward: Array) -> Ways:
        """What of the tensor axis's messages hides neither behind products nor, in a node, in waits for the host."""
        near, shares, out = self.links.nodes("tp") == 1, (self.regime.hidden, self.regime.behind), []
        if not any(shares):
            return forward, backward
        for share, sent, own, ahead in zip(shares, (forward, backward), self._device(), self._ahead()):
            hidden = np.minimum(share * sent, own)
            out.append(np.maximum(0.0, sent - hidden - near * np.maximum(0.0, ahead - own)))
        return out[0], out[1]

    def _context(self) -> Ways:
        """Ring: keys and values go round, backward with their gradients, behind the attention of each turn.

        Ulysses: all-to-alls of queries, keys, values and results, forward and backward. Recomputation is not counted.
        """
        cp, near = self.c.sizes["cp"], self.links.inside(("cp",))
        held = [u.unit for u in self.forms.units]
        layers = [sum(n for n, k in u.kernels if k.kind == "attention") * (u.heads[0] != 0) for u in held]
        calls = np.maximum(1e-9, self.ranked(self.counts @ np.array(layers, dtype=float)))
        rows = self.c.rows
        merge = ring_sums(self.on(lambda t: t.heads[0]), cp) / self.rate
        out = []
        for way, (whole, blocks) in enumerate(zip(self.exchanged(), self.turned())):
            ulysses = 4 * calls * collective_seconds(self.hardware, "all_to_all", whole / 4 / calls, cp, near)
            ulysses = ulysses + exchange_copies(whole / cp, rows) / self.rate
            ring = calls * collective_seconds(self.hardware, "all_gather", blocks / calls, cp, near)
            open_ = self._open(ring, self.on(lambda t, way=way: t.attention[way]))
            out.append(np.where(self.c.ulysses == 1, ulysses, open_ + merge))
        return out[0], out[1]

    def exchanged(self) -> Ways:
        """Bytes, of all context ranks, that Ulysses exchanges of a microbatch: queries, keys, values and results."""
        whole = (2 * self.on(lambda t: t.heads[0]) + self.on(lambda t: t.heads[1])) * self.c.sizes["cp"]
        return whole, whole

    def turned(self) -> Ways:
        """Bytes, of all context ranks, that go round in a ring: keys and values, backward their gradients as well.

        Gradients travel in the dtype of accumulation.
        """
        keys, wide = self.on(lambda t: t.heads[1]) * self.c.sizes["cp"], 2 if self.regime.compute_width == 2 else 1
        return keys, (1 + wide) * keys

    def send(self) -> Array:
        """Seconds of a message of one microbatch to the next stage."""
        hidden = self.most([t.hidden for t in self.times])
        pp, stride = self.c.sizes["pp"], self.links.strides["pp"]
        return send_seconds(self.hardware, hidden, pp * stride > self.hardware.node)

    def elements(self, counts: Array | None = None) -> dict[str, Array]:
        """Parameters of each row by the data axes of their gradients' sum: [rows, candidates]."""
        groups = sorted({g for t in self.times for g in t.parameters})
        out = {g: self.on(lambda t, g=g: t.parameters.get(g, 0.0), counts) for g in groups}
        if counts is None and np.any(self.tied):
            whole = max(groups, key=len)
            out[whole] = out[whole] - self.tied
        return out

    def ways(self, group: str) -> Array:
        """Ranks over which a group's gradients are summed: its data axes, and cp."""
        return reduce(np.multiply, (self.c.sizes[a] for a in axes_of(group)))

    def share(self, group: str) -> Array:
        """Ranks that share out one copy of a group."""
        ways = self.ways(group)
        return np.where((self.c.shard > 0) & (self.c.shard < ways), self.c.shard, ways)

    def moved(self, collective: str, width: int, blocks: bool = False) -> Array:
        """Seconds of a collective of parameters or gradients, for each unit one; ``blocks``: of blocks alone.

        Where data ranks keep several copies of shards, gradients are then summed over those. An engine copies into and
        out of a buffer; other systems keep all gradients in one.
        """
        counts, total = self.inner if blocks else self.counts, np.zeros(1)
        for group, elements in self.elements(self.inner if blocks else None).items():
            ways, share, near = self.ways(group), self.share(group), self.links.inside(axes_of(group))
            copies = ways / share
            holds = np.array([group in t.parameters for t in self.times], dtype=float)
            calls = self.ranked(counts @ holds) if self.regime.engine else elements * width / self.regime.bucket
            calls = np.maximum(1.0, calls)
            whole = elements * width / calls
            close = np.where(share < ways, common(share, near), near)
            seconds = calls * collective_seconds(self.hardware, collective, whole, share, close)
            if collective != "all_gather":
                apart = common(copies, np.maximum(1, near // share))
                summed = collective_seconds(self.hardware, "all_reduce", whole / share, copies, apart)
                seconds = seconds + calls * np.where((share < ways) & (collective != "all_reduce"), summed, 0.0)
            own = COPIES * elements * width / self.rate + calls * self.hardware.unit if self.regime.engine else 0.0
            total = total + np.where((ways > 1) & (elements > 0), seconds + own, 0.0)
        return total

    def gathers(self, compute: Ways) -> Ways:
        """What a microbatch's compute does not hide of the engine's traffic.

        Stage 3 gathers parameters, those of blocks again in the backward; stages 2 and 3 sum gradients with each
        microbatch, of several.
        """
        zero, m, r = self.c.zero, self.c.microbatches, self.regime
        if not np.any(zero >= 2):
            return np.zeros(1), np.zeros(1)
        gathered, again = (self.moved("all_gather", r.compute_width, blocks) for blocks in (False, True))
        summed = self.moved("reduce_scatter", r.reduce_width)
        third, second = zero == 3, (zero == 3) | ((zero == 2) & (m > 1))
        left = gathered * third, again * third + summed * second
        return self._open(left[0], compute[0]), self._open(left[1], compute[1])

    def gradients(self, compute: Ways) -> Array:
        """What the last backward does not hide of the sums of gradients, and of the gathers of stages 1 and 2."""
        zero, m, r = self.c.zero, self.c.microbatches, self.regime
        whole, summed, gathered = (
            self.moved(name, width)
            for name, width in (
                ("all_reduce", r.reduce_width), ("reduce_scatter", r.reduce_width), ("all_gather", r.compute_width)
            )
        )  # fmt: skip
        late = np.where((zero == 1) | ((zero == 2) & (m == 1)), summed, 0.0) + np.where(zero < 3, gathered, 0.0)
        return self._open(np.where(zero == 0, whole, late), compute[1])

    def _open(self, seconds: Array, compute: Array) -> Array:
        """What compute that runs meanwhile does not hide."""
        return np.maximum(0.0, seconds - self.overlap * compute)

    def dispatches(self) -> Array:
        """Bytes of the largest dispatch of rows to experts of each row's units; none along an axis of one rank."""
        out: Array = np.zeros(1)
        for calls, unit in zip(self.counts.T, self.times):
            for axis, held in unit.dispatches.items():
                travels = (self.ranked(calls) > 0) & (self.c.sizes[axis] > 1)
                out = np.maximum(out, np.where(travels, self.spread(held), 0.0))
        return out

    def matrices(self) -> Array:
        """Elements of the products' right factors of each row, of equal ones as of one call's."""
        sizes = list(dict.fromkeys(s for t in self.times for s in t.matrices))
        return self.ranked(np.zeros(len(self.counts))) + sum(
            self.fullest(lambda t, s=s: t.matrices.get(s, 0.0)) for s in sizes
        )

    def states(self) -> dict[str, Array]:
        """Bytes of parameters, gradients and optimizer state; none where they lie in host memory.

        Stage 1 of our engine sums gradients behind the last microbatch: of several, each rank adds up whole ones.
        """
        widths, zero, ours = self.regime.widths, self.c.zero, self.regime.engine
        stages = {"parameters": 1 if ours else 3, "gradients": 1 if ours else 2, "optimizer": 1}
        wide = {"parameters": widths.parameter, "gradients": widths.gradient, "optimizer": widths.optimizer}
        near = np.where(self.c.offload == 1, 0.0, 1.0)
        out: dict[str, Any] = dict.fromkeys(stages, 0.0)
        for group, elements in self.elements().items():
            share = self.share(group)
            for kind, stage in stages.items():
                cut = zero >= stage
                if ours and kind == "gradients":
                    cut = (zero > 1) | ((zero == 1) & (self.c.microbatches == 1))
                out[kind] = out[kind] + near * elements * wide[kind] / np.where(cut, share, 1.0)
        return out

    def hosted(self) -> Array:
        """Bytes of a rank's states that lie in host memory."""
        if not np.any(self.c.offload == 1):
            return np.zeros(1)
        widths, total = self.regime.widths, np.zeros(1)
        for group, elements in self.elements().items():
            total = total + elements * (widths.parameter + widths.gradient + widths.optimizer) / self.share(group)
        return np.where(self.c.offload == 1, total, 0.0)

    def update(self) -> Array:
        """The optimizer's pass over what a rank updates; from host memory where that is where it lies."""
        bandwidth = np.where(self.c.offload == 1, HOST_BANDWIDTH, self.rate)
        r, moved = self.regime, np.zeros(1)
        for group, elements in self.elements().items():
            own = elements / np.where(self.c.zero > 0, self.share(group), 1.0)
            moved = moved + own * r.update + elements * (r.checked + r.averaged * (self.ways(group) > 1))
        return moved / bandwidth


def axes_of(group: str) -> tuple[str, ...]:
    """The axes over which a group's gradients are summed."""
    return (*filter(None, group.split("+")), "cp")
