"""A family's closed forms evaluated on a grid of sizes at once, for one hardware profile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autopar.cost.balance import even_starts, filled_starts
from autopar.cost.closed import Family, Kernel, Unit
from autopar.cost.hardware import Hardware
from autopar.cost.links import Links
from autopar.cost.polynomials import Array, Expression, Polynomials
from autopar.cost.price import BACKWARD, FORWARD
from autopar.cost.schedule import placement

Points = Mapping[str, Array]
_ALONE: dict[str, Any] = {"b": 1.0, "s": 4096.0, "tp": 1.0, "cp": 1.0, "ep": 1.0, "dp": 1.0}
POLICIES = ("none", "selective", "full")
MOMENTS = ("transient", "alone", "scores")


@dataclass(frozen=True)
class UnitTimes:
    """Seconds and bytes of one call of a unit for each point of a grid.

    Args:
        forward, backward: seconds of compute, copies of conversions included. again: forward seconds of what selective
            recomputation repeats. tail: forward seconds of its last product.
        messages: exposed seconds by (axis, part of the step). flops: of matmuls and attention, (forward, backward).
        activations: bytes by policy of recomputation. hidden: bytes passed on.
        heads: bytes of (queries, keys and values). parameters: elements by data axes.
        attention: seconds of it, (forward, backward). rows: elements of the widest matmul's result, and of its input.
        matrices: elements of the products' right factors by their sizes, of an expert's as of one.
        dispatches: bytes of rows on their way to experts, by the axis that they travel along.
        gathered: bytes of what is gathered again in the backward.
        moment: bytes that a backward holds for a moment (``cost.transient``). scores: what attention keeps besides its
            inputs and result.
        once: as ``messages``, of what inputs alone make: sent once in a step, whatever its microbatches.
    """

    forward: Array
    backward: Array
    again: Array
    tail: Array
    messages: dict[tuple[str, str], Array]
    flops: tuple[Array, Array]
    activations: dict[str, Array]
    hidden: Array
    heads: tuple[Array, Array]
    parameters: dict[str, Array]
    attention: tuple[Array, Array]
    rows: tuple[Array, Array]
    matrices: "dict[tuple[Expression, ...], Array]"
    dispatches: dict[str, Array]
    gathered: Array
    once: dict[tuple[str, str], Array]
    moment: Array
    scores: Array

    def at(self, where: slice) -> "UnitTimes":
        """Some of the points."""

        def some(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: some(v) for key, v in value.items()}
            if isinstance(value, tuple):
                return tuple(map(some, value))
            return value[where] if np.ndim(value) and np.shape(value)[0] > 1 else value

        return UnitTimes(**{name: some(value) for name, value in vars(self).items()})

    @property
    def experts(self) -> Array:
        """Elements of the experts' parameters of a call: those whose gradients no sum over ep takes."""
        zero: Array = np.zeros(1)
        return self.parameters.get("dp", zero) if self.dispatches else zero

    @property
    def weight(self) -> Array:
        """Elements of all parameters of a call."""
        return np.sum(list(self.parameters.values()), axis=0) if self.parameters else np.zeros(1)


@dataclass(frozen=True)
class Forms:
    """The polynomials of every unit of a family."""

    family: Family

    @cached_property
    def units(self) -> tuple["UnitForms", ...]:
        """Of each unit, in order."""
        return tuple(UnitForms(u, self.family.own) for u in self.family.units)

    def stages(self, ranks: int, per_rank: int, v: bool = False, cuts: str = "best") -> Array:
        """[ranks, units]: how many calls of each unit a rank of a pipeline holds.

        Args:
            v: whether stages are placed back and forth. cuts: "best", for equal work; "even", equally many blocks;
                "filled", as ``balance.filled_starts``, by the elements of the units' matrices.
        """
        chain, stages = (0, *self.family.order, len(self.units) - 1), ranks * per_rank
        blocks = len(self.family.order)
        if self.family.cut:
            out = np.zeros((ranks, len(self.units)))
            np.add.at(out, (list(self.family.cut), list(chain)), 1)
            return out
        if cuts == "filled":
            starts: Sequence[int] = filled_starts([self._matrices[u] for u in chain], stages)
        elif cuts == "even" or stages == 1 or len(chain) <= stages:
            starts = [round(i * blocks / stages) + (i > 0) for i in range(stages)]
        else:
            starts = even_starts(tuple(self._work[u] for u in chain), stages)
        out = np.zeros((ranks, len(self.units)))
        ends = (*starts[1:], len(chain))
        for rank, start, end in zip(placement(ranks, per_rank, v), starts, ends):
            np.add.at(out[rank], list(chain[start:end]), 1)
        return out

    @cached_property
    def _work(self) -> tuple[float, ...]:
        """Flops of one call of each unit at a point of usual sizes."""
        found = []
        for unit in self.family.units:
            heavy = [(count, k.flops) for count, k in unit.kernels if k.kind != "memory"]
            flops = Polynomials.of([way for _, ways in heavy for way in ways])(_ALONE)
            found.append(float(flops.reshape(-1, 2).sum(axis=1) @ np.array([count for count, _ in heavy])))
        return tuple(found)

    @cached_property
    def _matrices(self) -> tuple[float, ...]:
        """Elements of the products' right factors of one call of each unit, whole; none before the blocks."""
        found = [0.0]
        for unit in self.family.units[1:]:
            sides = [(count, k.dims) for count, k in unit.kernels if k.kind == "matmul" and k.dims]
            sizes = Polynomials.of([side for _, dims in sides for side in dims[1:]])(_ALONE).reshape(-1, 2)
            found.append(float(np.prod(sizes, axis=1) @ np.array([count for count, _ in sides])))
        return tuple(found)


@dataclass(frozen=True)
class UnitForms:
    """The polynomials of one unit; ``own`` as in ``Family``."""

    unit: Unit
    own: bool = False

    @cached_property
    def _kernels(self) -> Polynomials:
        rows = []
        for _, k in self.unit.kernels:
            flops = k.flops if k.kind != "memory" else (0, 0)
            rows += [*flops, *k.bytes, *(k.dims or (1, 1, 1))]
        return Polynomials.of(rows)

    @cached_property
    def _messages(self) -> Polynomials:
        return Polynomials.of([m.bytes for m in self.unit.messages])

    @cached_property
    def _copies(self) -> Polynomials:
        return Polynomials.of([e for c in self.unit.copies for e in (c.bytes, c.major)])

    @cached_property
    def _held(self) -> Polynomials:
        u = self.unit
        held = (*(u.activations[p] for p in POLICIES), u.hidden, *u.heads, *(u.activations[n] for n in MOMENTS))
        return Polynomials.of([*held, *u.parameters.values(), *u.dispatches.values()])

    def times(self, points: Points, links: Links, hardware: Hardware) -> UnitTimes:
        """The unit on a grid. ``points``: arrays by ``b``, ``s`` and axis."""
        count = len(self.unit.kernels)
        work = self._kernels(points).reshape(count, 7, -1) if count else np.zeros((0, 7, 1))
        zero = np.zeros(np.broadcast_shapes(*(np.shape(p) for p in points.values())))
        forward, backward, again = zero.copy(), zero.copy(), zero.copy()
        widest, tail = (zero.copy(), zero.copy()), zero
        matrices: dict[tuple[Expression, ...], Array] = {}
        flops, attention = [zero.copy(), zero.copy()], [zero.copy(), zero.copy()]
        context = 1.0 if self.own else points["cp"]
        for (times, kernel), row in zip(self.unit.kernels, work):
            seconds = kernel_seconds(kernel, row, hardware, context)
            forward += times * seconds[0]
            backward += times * seconds[1]
            again += times * seconds[0] * (kernel.kind == "memory")
            for way in (0, 1):
                attention[way] += times * seconds[way] * (kernel.kind == "attention")
            if kernel.kind == "matmul":
                widest = np.maximum(widest[0], row[4] * row[5]), np.maximum(widest[1], row[4] * row[6])
                sizes = kernel.dims[1:] if kernel.dims else ()
                matrices[sizes] = matrices.get(sizes, zero) + times * row[5] * row[6]
                tail = seconds[0]
            turns = context if kernel.kind == "attention" else 1
            flops[0] += times * row[0] * turns
            flops[1] += times * row[1] * turns
        copied = self._copied(points, links, hardware)
        forward, backward = forward + copied[FORWARD], backward + copied[BACKWARD]
        held = self._held(points)
        sent = self._sent(points, links)
        kept, elements = held[:9], dict(zip(self.unit.parameters, held[9:]))
        rows = dict(zip(self.unit.dispatches, held[9 + len(elements) :]))
        moment: Array = np.where(points["tp"] > 1, kept[6], kept[7])
        return UnitTimes(
            forward, backward, again, tail, sent[False], (flops[0], flops[1]),
            dict(zip(POLICIES, kept[:3])), kept[3], (kept[4], kept[5]), elements, (attention[0], attention[1]), widest,
            matrices, rows, self._again(points), sent[True], moment, kept[8],
        )  # fmt: skip

    def _again(self, points: Points) -> Array:
        """Bytes of values that are gathered a second time."""
        again = np.array([m.calls * m.again for m in self.unit.messages])
        return again @ self._messages(points) if again.any() else np.zeros(1)

    def _copied(self, points: Points, links: Links, hardware: Hardware) -> dict[str, Any]:
        """Seconds of what conversions copy, by part of the step."""
        out: dict[str, Any] = {FORWARD: 0.0, BACKWARD: 0.0}
        rate = hardware.memory_bandwidth * hardware.memory_efficiency
        rows = self._copies(points)
        for copy, moved, major in zip(self.unit.copies, rows[::2], rows[1::2]):
            here = copy.context is None or (points["cp"] > 1) == copy.context
            done = (links.axes[copy.axis] > 1) & (major != 1) & here
            out[copy.when] = out[copy.when] + np.where(done, copy.calls * moved / rate, 0.0)
        return out

    def _sent(self, points: Points, links: Links) -> tuple[dict[tuple[str, str], Array], dict[tuple[str, str], Array]]:
        """Seconds of what each microbatch sends, and of what is sent once in a step."""
        out: tuple[dict[tuple[str, str], Any], dict[tuple[str, str], Any]] = ({}, {})
        for message, whole in zip(self.unit.messages, self._messages(points)):
            sums = message.axis == "dp" and not message.given and not self.own  # over positions, too
            mine = out[message.given]
            for axis in (message.axis, *(("cp",) if sums else ())):
                seconds = message.calls * links.seconds(message.collective, whole, axis, message.part)
                mine[axis, message.when] = mine.get((axis, message.when), 0) + seconds
        return out


def kernel_seconds(kernel: Kernel, row: Array, hardware: Hardware, context: Any) -> tuple[Array, Array]:
    """Roofline seconds, forward and backward, of [flops 2, bytes 2, m, n, k] by points.

    Attention meets the keys of all ``context`` ranks.
    """
    peak = hardware.flops_per_second(kernel.dtype)
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    moved = row[2] / bandwidth, row[3] / bandwidth
    if kernel.kind == "memory":
        return moved[0], moved[1]
    if kernel.kind == "rows":
        return moved[0] / hardware.rows, moved[1] / hardware.rows
    if kernel.kind == "attention":
        rates = [peak * e for e in hardware.attention([float(size.max()) for size in row[4:6]])]
        return np.maximum(row[0] * context / rates[0], moved[0]), np.maximum(row[1] * context / rates[1], moved[1])
    rate = peak * hardware.matmul_efficiency * np.prod(row[4:] / (row[4:] + hardware.matmul_half), axis=0)
    return np.maximum(row[0] / rate, moved[0]), np.maximum(row[1] / rate, moved[1])


__all__ = ["BACKWARD", "FORWARD", "Forms", "UnitForms", "UnitTimes"]
