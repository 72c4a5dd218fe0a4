"""What collectives on each axis take, for many meshes at once: ``communication`` in arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost.hardware import Hardware
from autopar.cost.polynomials import Array


@dataclass(frozen=True)
class Links:
    """The links of every axis for each point of a grid.

    Args:
        axes: ranks along each axis, or along several joined by ``+``. strides: how far apart those of an axis are
            numbered, minor axis first. world: ranks of the mesh.
    """

    hardware: Hardware
    axes: Mapping[str, Array]
    strides: Mapping[str, Array]
    world: Array

    @staticmethod
    def placed(hardware: Hardware, sizes: Mapping[str, Array], order: tuple[str, ...]) -> "Links":
        """Links of a row-major mesh whose axes are ``order``, major to minor; data axes also together."""
        strides, stride = {}, np.ones(1)
        for axis in reversed(order):
            strides[axis] = stride
            stride = stride * sizes[axis]
        both = {"dp+ep": sizes["dp"] * sizes["ep"]}
        return Links(hardware, {**{a: sizes[a] for a in order}, **both}, strides, stride)

    def inside(self, axes: Sequence[str]) -> Array:
        """How many of the ranks along several axes together share a node."""
        members = ((self.axes[a], stride) for a, stride in self.strides.items() if a in axes)
        return inside(self.hardware.node, members, self.world)

    def nodes(self, axis: str) -> Array:
        """Nodes along an axis."""
        return np.ceil(self.axes[axis] / self.inside((axis,)))

    def seconds(self, collective: str, whole: Array, axis: str, part: tuple[int, int] | None = None) -> Array:
        """Seconds of a collective on a value of ``whole`` bytes; zero on one rank.

        ``part``: of a part of the axis, how many ranks it has, and how far apart they are numbered along the axis.
        """
        if part is not None:
            ways, apart = part
            near = inside(self.hardware.node, [(ways, apart * self.strides[axis])], self.world)
            return collective_seconds(self.hardware, collective, whole, ways, near)
        near = self.inside(axis.split("+"))
        return collective_seconds(self.hardware, collective, whole, self.axes[axis], near)


def inside(node: int, axes: Iterable[tuple[Any, Any]], world: Any) -> Array:
    """How many of a group of ranks share a node of ``node`` ranks, where fewest do: one that crosses its border.

    Exact where distances divide a node, or a node them; never too many elsewhere.

    Args:
        axes: of the group, minor first: ranks, and how far apart they are numbered. world: ranks of the whole mesh.
    """
    near, run, start, every = map(_whole, np.ones((4, 1)))
    for ways, stride in (map(_whole, axis) for axis in axes):
        joined = stride == start * run  # with the axes before it, one run of ranks that are equally far apart
        near = np.where(joined, near, near * _on_node(node, run, start))
        start, run, every = np.where(joined, start, stride), np.where(joined, run * ways, ways), every * ways
    return np.where(world <= node, every, near * _on_node(node, run, start))


def _on_node(node: int, ways: Array, stride: Array) -> Array:
    each = np.maximum(1, node // stride)
    odd = np.where(ways * stride % node == 0, each, 1)
    return np.where(node % np.minimum(stride, node) == 0, common(ways, each), np.minimum(ways, odd))


def common(a: Any, b: Any) -> Array:
    """The greatest common divisor of whole numbers."""
    return np.gcd(_whole(a), _whole(b))


def _whole(values: Any) -> Array:
    return np.asarray(values).astype(np.int64)


def send_seconds(hardware: Hardware, count: Any, across: Any) -> Array:
    """Seconds of a message of ``count`` bytes to a neighbour; ``across``: whether such messages leave a node."""
    inner, outer = (tier.base + tier.latency + count / tier.rate("p2p") for tier in (hardware.inner, hardware.outer))
    return np.where(across, outer, inner)


def exchange_copies(sent: Any, rows: Any) -> Any:
    """Bytes that a rank moves for all-to-alls of ``sent`` of its own bytes that exchange heads and positions.

    Before and behind each (``cost.copies``), one of them where there are several ``rows`` alone.
    """
    return 2 * sent * (1 + (rows > 1))


def ring_sums(queries: Any, ways: Any) -> Any:
    """Bytes that a ring moves on each way to add up what its turns give: sums in float32, and a result.

    ``queries``: bytes of a rank's. Forward they are sums of results, backward of gradients.
    """
    return (ways - 1) * 5 * queries / 2


def collective_seconds(hardware: Hardware, collective: str, whole: Any, ways: Any, inside: Any) -> Array:
    """``communication.collective_seconds`` over ``communication.link_with``, in arrays."""
    inner, outer = hardware.inner, hardware.outer
    nodes = np.ceil(ways / inside)
    across = np.where(
        inside == 1, outer.rate(collective), np.minimum(inner.rate(collective), inside * outer.rate(collective))
    )
    if collective == "all_to_all":  # each rank reaches ranks of other nodes through its own adapter
        slowest = np.maximum((inside - 1) / inner.rate(collective), (ways - inside) / outer.rate(collective))
        across = (ways - 1) / np.maximum(slowest, 1e-30)
    rate = np.where(nodes == 1, inner.rate(collective), across)
    rounds = 2 if collective == "all_reduce" else 1
    outside = rounds * (nodes - 1)
    near, far = inner.step(collective), outer.step(collective)
    base = np.where(nodes == 1, inner.base, max(inner.base, outer.base))
    sent = rounds * whole * (ways - 1) / (ways**2 if collective == "all_to_all" else ways)
    steps = (rounds * (ways - 1) - outside) * near + outside * far
    return np.where(ways > 1, steps + base + sent / rate, 0.0)
