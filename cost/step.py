"""Time and memory of a step for many candidates at once: units on stages, microbatches, gradients, optimizer.

A rank of a pipeline runs (m - 1) microbatches at the pace of the slowest stage; filling and draining take one more of
every stage (arXiv:1811.06965; arXiv:2104.04473, section 2.2), over v where each rank holds v stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from autopar.cost.forms import BACKWARD, FORWARD, POLICIES, Forms, UnitTimes
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
    """Columns that broadcast: of equal length, or one dim for each choice.

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

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all columns together."""
        return np.broadcast_shapes(*(v.shape for v in self._columns.values()), *(v.shape for v in self.sizes.values()))

    @property
    def _columns(self) -> dict[str, Array]:
        return {n: v for n, v in vars(self).items() if isinstance(v, np.ndarray)}

    def take(self, where: Any) -> "Candidates":
        """Those at flat indices, as columns of equal length."""
        shape = self.shape
        at = np.unravel_index(where, shape)
        columns = {n: np.broadcast_to(v, shape)[at] for n, v in self._columns.items()}
        sizes = {axis: np.broadcast_to(v, shape)[at] for axis, v in self.sizes.items()}
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
    names = ("seconds", "compute", "bubble", "optimizer", "flops", "hardware_flops")
    plain = {n: join(lambda p, n=n: getattr(p, n)) for n in names}
    exposed = {a: join(lambda p, a=a: p.exposed.get(a, 0.0)) for a in axes}
    memory = {k: join(lambda p, k=k: p.memory[k]) for k in KINDS}
    return Steps(exposed=exposed, memory=memory, **plain)


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


class Group:
    """Candidates with equally many stages, equally placed, whose columns broadcast.

    Arrays have one dim more in front: ranks of the pipeline, of which equal ones are one, the first of them.
    """

    def __init__(
        self, forms: Forms, hardware: Hardware, candidates: Candidates, regime: Regime,
        times: Sequence[UnitTimes] | None = None,
    ) -> None:  # fmt: skip
        self.forms, self.hardware, self.c, self.regime = forms, hardware, candidates, regime
        self.pp, self.virtual = int(candidates.sizes["pp"].flat[0]), int(candidates.virtual.flat[0])
        self.links = Links.placed(hardware, candidates.sizes, candidates.order)
        self.base = np.broadcast_shapes(candidates.rows.shape, *(n.shape for n in candidates.sizes.values()))
        self.times = times or times_of(forms, hardware, candidates)
        v = int(candidates.schedule.flat[0]) == SCHEDULES.index("zbv")
        every = forms.stages(self.pp, self.virtual, v, regime.even)
        self.counts, self.first, self.ranks = np.unique(every, axis=0, return_index=True, return_counts=True)
        self.tied = np.zeros(1)
        if forms.family.tied != 0 and self.pp == 1:
            self.tied = self._spread(Polynomials.of([forms.family.tied])(points_of(candidates))[0])

    def _spread(self, values: Any) -> Array:
        """[..., points] as columns."""
        values = np.asarray(values)
        points = int(np.prod(self.base))
        return np.broadcast_to(values, (*values.shape[:-1], points)).reshape(*values.shape[:-1], *self.base)

    def _ranked(self, values: Any) -> Array:
        """[ranks] as columns with ranks in front."""
        return np.asarray(values).reshape(-1, *(1 for _ in self.base))

    def on(self, pick: Any, counts: Array | None = None) -> Array:
        """Sum over the units of each rank, [ranks, ...]."""
        points = (int(np.prod(self.base)),)
        rows = np.array([np.broadcast_to(pick(t), points) for t in self.times])
        return self._spread(np.tensordot(self.counts if counts is None else counts, rows, axes=1))

    def mean(self, values: Array) -> Array:
        """Sum over all ranks of the pipeline of what each takes."""
        return np.tensordot(self.ranks, values, axes=1)

    def totals(self) -> tuple[Array, Array]:
        """(seconds, bytes of the fullest rank)."""
        own, exposed = self._work()
        each = own + sum(exposed.values())
        late = self._gradients().max(axis=0) + self._update().max(axis=0)
        seconds = self.c.microbatches * each.max(axis=0) + self._bubble(each) + late
        return seconds, reduce(np.add, self._held().values()).max(axis=0)

    def steps(self) -> Steps:
        """The price of all, by its parts."""
        own, exposed = self._work()
        each = own + sum(exposed.values())
        slowest = each.argmax(axis=0)[None]
        m = self.c.microbatches

        def of_slowest(rows: Array) -> Array:
            return np.take_along_axis(np.broadcast_to(rows, each.shape), slowest, axis=0)[0]

        bubble = self._bubble(each)
        gradients, update = self._gradients().max(axis=0), self._update().max(axis=0)
        shown = {axis: m * of_slowest(rows) for axis, rows in exposed.items()}
        shown["dp"] = shown["dp"] + gradients
        seconds = m * each.max(axis=0) + bubble + gradients + update
        return Steps(seconds, m * of_slowest(own), bubble, shown, update, self._memory(), *self._flops())

    def _work(self) -> tuple[Array, dict[str, Array]]:
        """Seconds of one microbatch on each rank: its own, and of communication that nothing hides, by axis."""
        own = self.on(lambda t: t.forward) + self.on(lambda t: t.backward) + self._again()
        own = np.maximum(own, self._host())
        exposed = {**self._sent(), "pp": self._p2p()}
        exposed["dp"] = exposed.get("dp", 0.0) + self._gathers(own)
        return own, exposed

    def _flops(self) -> tuple[Array, Array]:
        """Of the model on all ranks, and with what full recomputation repeats."""
        copies = self.c.microbatches * reduce(np.multiply, self.c.sizes.values()) / self.pp
        forward, backward = (self.mean(self.on(lambda t, i=i: t.flops[i])) * copies for i in (0, 1))
        return forward + backward, forward * (1 + (self.c.recompute == 2)) + backward

    def _again(self) -> Array:
        """What recomputation repeats: of the blocks, not of what stands before and behind them."""
        full, selective = self.c.recompute == 2, self.c.recompute == 1
        inner = self.counts.copy()
        inner[:, [0, -1]] = 0
        return self.on(lambda t: t.again, inner) * selective + self.on(lambda t: t.forward, inner) * full

    def _host(self) -> Array:
        """Seconds in which the host issues the kernels of a microbatch; a backward has about twice as many."""
        units = [u.unit for u in self.forms.units]
        launches = [sum(n for n, _ in u.kernels) + sum(m.calls for m in u.messages) / 3 for u in units]
        total = self.counts @ np.array(launches, dtype=float)
        return self.regime.host * self._ranked(total) * (3 + (self.c.recompute == 2))

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
            out["cp"] = out.get("cp", 0.0) + self._context()
        return out

    def _context(self) -> Array:
        """Ring: keys and values go round forward, and with their gradients backward, behind the attention of each turn.

        Ulysses: all-to-alls of queries, keys, values and results, forward and backward.
        """
        cp, stride = self.c.sizes["cp"], self.links.strides["cp"]
        queries, keys = self.on(lambda t: t.heads[0]), self.on(lambda t: t.heads[1])
        layers = [sum(n for n, k in u.unit.kernels if k.kind == "attention") for u in self.forms.units]
        calls = np.maximum(1e-9, self._ranked(self.counts @ np.array(layers, dtype=float)))
        ring = 2 * calls * collective_seconds(self.hardware, "all_gather", 1.5 * keys * cp / calls, cp, stride)
        work = self.on(lambda t: t.attention)
        rate = self.hardware.memory_bandwidth * self.hardware.memory_efficiency
        merge = (cp - 1) * 5 * queries / rate  # fp32 sums read and written, the turn's own result read
        each = (2 * queries + keys) * cp / 4 / calls
        ulysses = 8 * calls * collective_seconds(self.hardware, "all_to_all", each, cp, stride)
        return np.where(self.c.ulysses == 1, ulysses, np.maximum(0.0, ring - self.regime.overlap * work) + merge)

    def _p2p(self) -> Array:
        """Sends to the next stage and back, of each microbatch."""
        if self.pp == 1:
            return self._ranked(np.zeros(1))
        hidden = self._most([t.hidden for t in self.times])
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
            out[whole] = out[whole] - self.tied
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

    def _gradients(self) -> Array:
        """Sums of gradients after the last microbatch, and gathers of stages 1 and 2; partly behind the backward."""
        total: Any = 0.0
        m, backward = self.c.microbatches, self.on(lambda t: t.backward)
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

    def _bubble(self, each: Array) -> Array:
        """Seconds of waiting while the pipeline fills and drains; zero-bubble schedules put W where others wait."""
        if self.pp == 1:
            return np.zeros(1)
        backward = self.mean(self.on(lambda t: t.backward)) / self.pp
        fill = (self.mean(each) - each.max(axis=0)) / self.virtual
        mean, weight = self.mean(self.on(lambda t: t.forward)) / self.pp + backward, backward / 2
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
        every = self._held()
        total = reduce(np.add, every.values())
        at = total.argmax(axis=0)[None]
        return {k: np.take_along_axis(np.broadcast_to(v, total.shape), at, axis=0)[0] for k, v in every.items()}

    def _held(self) -> dict[str, Array]:
        """Bytes of each rank by kind."""
        last = self._spread(self.times[-1].rows)
        work = np.where(self._ranked(self.counts[:, -1]) > 0, self.regime.workspace * last, 0.0)
        work = work + self.regime.copies * self._most([t.weight for t in self.times[1:-1]])
        return {**self._states(), "activations": self._activations(), "workspace": work + self.regime.reserve}

    def _most(self, values: list[Array]) -> Array:
        """The largest of several at each point."""
        return self._spread(reduce(np.maximum, values, np.zeros(1)))

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
            two = elements * self._ranked(np.minimum(1.0, 2.0 / np.maximum(1.0, self.counts.sum(axis=1))))
            copy = np.where(zero == 3, two, elements if ours else 0.0)
            out["gathered"] = out["gathered"] + copy * self.regime.compute_width
        return out

    def _activations(self) -> Array:
        """Kept by the microbatches in flight, and one block's inside while it is computed again."""
        policies = [self.on(lambda t, p=p: t.activations[p]) for p in POLICIES]
        each = np.choose(self.c.recompute.astype(int)[None], policies) * self._in_flight()
        inside = self._most([t.activations["none"] for t in self.times[1:-1]])
        return each + np.where(self.c.recompute > 0, inside, 0.0)

    def _in_flight(self) -> Array:
        """Microbatches whose activations a rank holds at its fullest (arXiv:2205.05198, appendix B and C)."""
        m, rank = self.c.microbatches, self._ranked(self.first)
        more = 1.0 if self.virtual == 1 else 1 + (self.pp - 1) / (self.pp * self.virtual)
        after = np.minimum(m, self.pp - rank) * more
        every, most = m + 0.0 * rank, np.minimum(m, self.pp) + 0.0 * rank
        return np.choose(self.c.schedule.astype(int)[None], [after, every, after, after, most])
