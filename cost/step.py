"""Time and memory of a step for many candidates at once: units on stages, microbatches, gradients, optimizer.

A rank of a pipeline runs (m - 1) microbatches at the pace of the slowest stage; filling and draining take one more of
every stage (arXiv:1811.06965; arXiv:2104.04473, section 2.2), over v where each rank holds v stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from autopar.cost.cut import stages_of
from autopar.cost.forms import BACKWARD, FORWARD, POLICIES, Forms
from autopar.cost.hardware import Hardware
from autopar.cost.links import Links, collective_seconds
from autopar.cost.polynomials import Array, Polynomials
from autopar.cost.regime import Regime

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
ORDER = ("pp", "dp", "ep", "cp", "tp")
HOST_BANDWIDTH = 25e9  # bytes per second between host and device: 80% of PCIe 4.0 x16 (31.5 GB/s)
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "workspace")


@dataclass(frozen=True)
class Candidates:
    """Columns of equal length.

    Args:
        sizes: ranks by axis. rows: of a microbatch on one data rank. microbatches: of a step. zero: stage. shard: data
            ranks that share out a copy, 0 for all. recompute: index into ``forms.POLICIES``. schedule: index into
            ``SCHEDULES``. virtual: stages a rank. offload: 1 where states live in host memory. ulysses: 1, or 0: ring.
        positions: of the whole sequence. order: of the mesh, major to minor.
    """

    sizes: Mapping[str, Array]
    rows: Array
    microbatches: Array
    zero: Array
    shard: Array
    recompute: Array
    schedule: Array
    virtual: Array
    offload: Array
    ulysses: Array
    positions: float
    order: tuple[str, ...] = ORDER

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, where: Any) -> "Candidates":
        """Those that an index or a mask chooses."""
        columns = {n: v[where] for n, v in vars(self).items() if isinstance(v, np.ndarray)}
        sizes = {axis: v[where] for axis, v in self.sizes.items()}
        return Candidates(sizes=sizes, positions=self.positions, order=self.order, **columns)


@dataclass(frozen=True)
class Steps:
    """The price of each candidate. Seconds and bytes of the fullest rank.

    Args:
        seconds: of the step. compute: of it, one rank's own work, recomputation included. bubble: waiting for others.
        exposed: by axis, communication that nothing hides. optimizer: the update.
        memory: by kind, of the rank that holds most. flops: of the model, all ranks, recomputation not counted.
    """

    seconds: Array
    compute: Array
    bubble: Array
    exposed: dict[str, Array]
    optimizer: Array
    memory: dict[str, Array]
    flops: Array
    hardware_flops: Array

    @property
    def peak(self) -> Array:
        """Bytes of the fullest rank."""
        return np.sum(list(self.memory.values()), axis=0)


def steps(forms: Forms, hardware: Hardware, candidates: Candidates, regime: Regime) -> Steps:
    """Price every candidate of one family and one placement."""
    parts = []
    for pp in np.unique(candidates.sizes["pp"]):
        where = np.flatnonzero(candidates.sizes["pp"] == pp)
        for virtual in np.unique(candidates.virtual[where]):
            inside = where[candidates.virtual[where] == virtual]
            parts.append(
                (inside, _Group(forms, hardware, candidates.take(inside), regime, int(pp), int(virtual)).steps())
            )
    return _joined(parts, len(candidates))


def _joined(parts: list[tuple[Array, Steps]], count: int) -> Steps:
    def join(pick: Any) -> Array:
        out = np.zeros(count)
        for where, part in parts:
            out[where] = pick(part)
        return out

    axes = sorted({a for _, p in parts for a in p.exposed})
    names = ("seconds", "compute", "bubble", "optimizer", "flops", "hardware_flops")
    plain = {n: join(lambda p, n=n: getattr(p, n)) for n in names}
    exposed = {a: join(lambda p, a=a: p.exposed.get(a, 0.0)) for a in axes}
    memory = {k: join(lambda p, k=k: p.memory[k]) for k in KINDS}
    return Steps(exposed=exposed, memory=memory, **plain)


class _Group:
    """Candidates with equally many stages. Rows are ranks whose units are equal: the first of them stands for all."""

    def __init__(
        self, forms: Forms, hardware: Hardware, candidates: Candidates, regime: Regime, pp: int, virtual: int
    ) -> None:
        self.forms, self.hardware, self.c, self.regime = forms, hardware, candidates, regime
        self.pp, self.virtual = pp, virtual
        self.links = Links.placed(hardware, candidates.sizes, candidates.order)
        points, self.back = self._points()
        links = Links.placed(hardware, {"pp": np.full(1, pp), **points}, candidates.order)
        self.times = [u.times(points, links, hardware) for u in forms.units]
        every = stages_of(forms.family, pp, virtual, regime.even)
        self.counts, self.first, self.ranks = np.unique(every, axis=0, return_index=True, return_counts=True)
        if forms.family.tied != 0 and pp == 1:
            self.tied = Polynomials.of([forms.family.tied])(points)[0]
        else:
            self.tied = np.zeros(1)

    def _points(self) -> tuple[dict[str, Array], Any]:
        """Distinct sizes of a microbatch and its axes, and the index of each candidate's."""
        c = self.c
        names = ("dp", "ep", "cp", "tp", "b", "s")
        columns = [*(c.sizes[a] for a in names[:4]), c.rows, c.positions / c.sizes["cp"]]
        distinct, back = np.unique(np.stack(columns), axis=1, return_inverse=True)
        return dict(zip(names, distinct)), back.reshape(-1)

    def at(self, pick: Any) -> Array:
        """Sum over the units of each rank at the distinct points: [ranks, points]."""
        points = (self.back.max() + 1,)
        return np.tensordot(self.counts, np.array([np.broadcast_to(pick(t), points) for t in self.times]), axes=1)

    def on(self, pick: Any) -> Array:
        """The same for each candidate: [ranks, candidates]."""
        return self.at(pick)[:, self.back]

    def steps(self) -> Steps:
        """The price of all."""
        forward, backward = self.on(lambda t: t.forward), self.on(lambda t: t.backward)
        own = np.maximum(forward + backward + self._again(), self._host())
        exposed = {**self._sent(), "pp": self._p2p()}
        exposed["dp"] = exposed.get("dp", 0.0) + self._gathers(own)
        each = own + sum(exposed.values())
        slowest = each.argmax(axis=0)[None]
        m = self.c.microbatches

        def of_slowest(rows: Array) -> Array:
            return np.take_along_axis(np.broadcast_to(rows, each.shape), slowest, axis=0)[0]

        bubble = self._bubble(each, forward, backward)
        gradients, update = self._gradients(backward).max(axis=0), self._update().max(axis=0)
        shown = {axis: m * of_slowest(rows) for axis, rows in exposed.items()}
        shown["dp"] = shown["dp"] + gradients
        seconds = m * each.max(axis=0) + bubble + gradients + update
        return Steps(seconds, m * of_slowest(own), bubble, shown, update, self._memory(), *self._flops())

    def _flops(self) -> tuple[Array, Array]:
        """Of the model on all ranks, and with what full recomputation repeats."""
        copies = self.c.microbatches * np.prod(list(self.c.sizes.values()), axis=0) / self.pp
        forward, backward = (self.ranks @ self.on(lambda t, i=i: t.flops[i]) * copies for i in (0, 1))
        return forward + backward, forward * (1 + (self.c.recompute == 2)) + backward

    def _again(self) -> Array:
        """What recomputation repeats: of the blocks, not of what stands before and behind them."""
        full, selective = self.c.recompute == 2, self.c.recompute == 1
        inner = self.counts.copy()
        inner[:, [0, -1]] = 0
        rows = [np.array([getattr(t, name) for t in self.times]) for name in ("again", "forward")]
        parts = [np.tensordot(inner, r, axes=1)[:, self.back] for r in rows]
        return parts[0] * selective + parts[1] * full

    def _host(self) -> Array:
        """Seconds in which the host issues the kernels of a microbatch; a backward has about twice as many."""
        launches = [sum(n for n, _ in u.unit.kernels) + len(u.unit.messages) / 3 for u in self.forms.units]
        total = self.counts @ np.array(launches, dtype=float)
        return self.regime.host * total[:, None] * (3 + (self.c.recompute == 2))[None, :]

    def _sent(self) -> dict[str, Array]:
        """Seconds of the units' own collectives by axis; full recomputation repeats the forward's."""
        full = self.c.recompute == 2
        out = {}
        for axis in sorted({axis for t in self.times for axis, _ in t.messages}):
            forward = self.on(lambda t, a=axis: t.messages.get((a, FORWARD), 0.0))
            backward = self.on(lambda t, a=axis: t.messages.get((a, BACKWARD), 0.0))
            open_ = 1 - self.regime.hidden if axis == "tp" else 1.0
            out[axis] = (forward * (1 + full) + backward) * open_
        if np.any(self.c.sizes["cp"] > 1):
            out["cp"] = self._context()
        return out

    def _context(self) -> Array:
        """Ring: keys and values go round forward, and with their gradients backward, behind the attention of each turn.

        Ulysses: all-to-alls of queries, keys, values and results, forward and backward.
        """
        cp, stride = self.c.sizes["cp"], self.links.strides["cp"]
        queries, keys = self.on(lambda t: t.heads[0]), self.on(lambda t: t.heads[1])
        ring = 3 * collective_seconds(self.hardware, "all_gather", keys * cp, cp, stride)
        work = self.on(lambda t: t.attention)
        rate = self.hardware.memory_bandwidth * self.hardware.memory_efficiency
        merge = (cp - 1) * 5 * queries / rate  # fp32 sums read and written, the turn's own result read
        ulysses = collective_seconds(self.hardware, "all_to_all", 2 * (2 * queries + keys) * cp, cp, stride)
        return np.where(self.c.ulysses == 1, ulysses, np.maximum(0.0, ring - self.regime.overlap * work) + merge)

    def _p2p(self) -> Array:
        """Sends to the next stage and back, of each microbatch."""
        if self.pp == 1:
            return np.zeros((1, len(self.c)))
        hidden = np.max([np.broadcast_to(t.hidden, (self.back.max() + 1,)) for t in self.times], axis=0)[self.back]
        across = self.links.strides["pp"] >= self.hardware.node
        rate = np.where(across, self.hardware.outer.rate("p2p"), self.hardware.inner.rate("p2p"))
        late = np.where(across, self.hardware.outer.latency, self.hardware.inner.latency)
        return ((hidden / rate + late) * 2 * self.virtual)[None, :]

    def _elements(self) -> dict[str, Array]:
        """Parameters of each rank by the data axes of their gradients' sum: [ranks, candidates]."""
        groups = sorted({g for t in self.times for g in t.parameters})
        out = {g: self.on(lambda t, g=g: t.parameters.get(g, 0.0)) for g in groups}
        if self.pp == 1 and self.forms.family.tied != 0:
            whole = max(groups, key=len)
            out[whole] = out[whole] - self.tied[self.back]
        return out

    def _ways(self, group: str) -> Array:
        """Ranks over which a group's gradients are summed: its data axes, and cp."""
        ways = self.c.sizes["cp"]
        for axis in filter(None, group.split("+")):
            ways = ways * self.c.sizes[axis]
        return ways

    def _share(self, group: str) -> Array:
        """Ranks that share out one copy of a group."""
        ways = self._ways(group)
        return np.where((self.c.shard > 0) & (self.c.shard < ways), self.c.shard, ways)

    def _data(self, collective: str, elements: Array, width: int, group: str) -> Array:
        stride = self._stride(group)
        return collective_seconds(self.hardware, collective, elements * width, self._share(group), stride)

    def _stride(self, group: str) -> Any:
        """How far apart the nearest ranks of a group are."""
        strides = [self.links.strides[a] for a in (*filter(None, group.split("+")), "cp")]
        return reduce(np.minimum, strides)

    def _gathers(self, own: Array) -> Array:
        """Stage 3: what compute does not hide of two gathers of parameters and a scatter of gradients a microbatch."""
        total: Any = 0.0
        for group, elements in self._elements().items():
            total = total + 2 * self._data("all_gather", elements, self.regime.compute_width, group)
            total = total + self._data("reduce_scatter", elements, self.regime.reduce_width, group)
        return np.where(self.c.zero == 3, np.maximum(0.0, total - self.regime.overlap * own), 0.0)

    def _gradients(self, backward: Array) -> Array:
        """Sums of gradients after the last microbatch, and gathers of stages 1 and 2; partly behind the backward."""
        total: Any = 0.0
        m = self.c.microbatches
        for group, elements in self._elements().items():
            reduced = self._data("reduce_scatter", elements, self.regime.reduce_width, group)
            whole = self._data("all_reduce", elements, self.regime.reduce_width, group)
            gathered = self._data("all_gather", elements, self.regime.compute_width, group)
            late = np.where(self.c.zero == 2, reduced * m, reduced) + gathered
            own = np.where(self.c.zero == 0, whole, np.where(self.c.zero == 3, 0.0, late))
            total = total + own + self._copies(elements, group)
        window = np.where(self.c.zero == 2, backward * m, backward)
        return np.maximum(0.0, total - self.regime.overlap * window)

    def _copies(self, elements: Array, group: str) -> Array:
        """Sum over the copies of shards, where data ranks keep several."""
        share, ways = self._share(group), self._ways(group)
        stride = share * self._stride(group)
        part = elements * self.regime.reduce_width / share
        copies = collective_seconds(self.hardware, "all_reduce", part, ways / share, stride)
        return np.where((self.c.zero > 0) & (share < ways), copies, 0.0)

    def _bubble(self, each: Array, forward: Array, backward: Array) -> Array:
        """Seconds of waiting while the pipeline fills and drains; zero-bubble schedules put W where others wait."""
        fill = (self.ranks @ each - each.max(axis=0)) / self.virtual
        mean, weight = self.ranks @ (forward + backward) / self.pp, self.ranks @ backward / self.pp / 2
        left = [np.maximum(0.0, mean - n * weight) / np.maximum(mean, 1e-30) for n in (2, 3)]
        return np.choose(self.c.schedule.astype(int), [fill, fill, fill, fill * left[0], fill * left[1]])

    def _update(self) -> Array:
        """The optimizer's pass over what a rank updates; from host memory where that is where it lies."""
        rate = self.hardware.memory_bandwidth * self.hardware.memory_efficiency
        bandwidth = np.where(self.c.offload == 1, HOST_BANDWIDTH, rate)
        own = [e / np.where(self.c.zero > 0, self._share(g), 1.0) for g, e in self._elements().items()]
        return np.sum(own, axis=0) * self.regime.update / bandwidth

    def _memory(self) -> dict[str, Array]:
        """Bytes by kind of the rank that holds most."""
        work = np.where(self.counts[:, -1:] > 0, self.regime.workspace * self.times[-1].rows[self.back], 0.0)
        block = max((t.weight for t in self.times[1:-1]), key=np.max, default=np.zeros(1))
        work = work + self.regime.copies * np.broadcast_to(block, (self.back.max() + 1,))[self.back]
        every = {**self._states(), "activations": self._activations(), "workspace": work + self.regime.reserve}
        total = sum(every.values())
        at = total.argmax(axis=0)[None]
        return {k: np.take_along_axis(np.broadcast_to(v, total.shape), at, axis=0)[0] for k, v in every.items()}

    def _states(self) -> dict[str, Array]:
        widths, zero, ours = self.regime.widths, self.c.zero, self.regime.engine
        stages = {"parameters": 1 if ours else 3, "gradients": 1 if ours else 2, "optimizer": 1}
        wide = {"parameters": widths.parameter, "gradients": widths.gradient, "optimizer": widths.optimizer}
        out: dict[str, Any] = dict.fromkeys((*stages, "gathered"), 0.0)
        near = np.where(self.c.offload == 1, 0.0, 1.0)
        for group, elements in self._elements().items():
            share = self._share(group)
            for kind, stage in stages.items():
                out[kind] = out[kind] + near * elements * wide[kind] / np.where(zero >= stage, share, 1.0)
            two = elements * np.minimum(1.0, 2.0 / np.maximum(1.0, self.counts.sum(axis=1)))[:, None]
            copy = np.where(zero == 3, two, elements if ours else 0.0)
            out["gathered"] = out["gathered"] + copy * self.regime.compute_width
        return out

    def _activations(self) -> Array:
        """Kept by the microbatches in flight, and one block's inside while it is computed again."""
        each = np.choose(
            self.c.recompute.astype(int)[None, :], [self.on(lambda t, p=p: t.activations[p]) for p in POLICIES]
        )
        each = each * self._in_flight()
        block = max((t.activations["none"] for t in self.times[1:-1]), key=np.max, default=np.zeros(1))
        inside = np.broadcast_to(block, (self.back.max() + 1,))[self.back]
        return each + np.where(self.c.recompute > 0, inside, 0.0)

    def _in_flight(self) -> Array:
        """Microbatches whose activations a rank holds at its fullest (arXiv:2205.05198, appendix B and C)."""
        m, rank = self.c.microbatches[None, :], self.first[:, None]
        after = np.minimum(m, self.pp - rank) * (
            1.0 if self.virtual == 1 else 1 + (self.pp - 1) / (self.pp * self.virtual)
        )
        every, most = m + 0.0 * rank, np.minimum(m, self.pp) + 0.0 * rank
        return np.choose(self.c.schedule.astype(int)[None, :], [after, every, after, after, most])
