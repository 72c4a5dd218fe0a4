"""What collectives on each axis take, for many meshes at once: ``communication`` in arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from autopar.cost.hardware import Hardware
from autopar.cost.polynomials import Array


@dataclass(frozen=True)
class Links:
    """The links of every axis for each point of a grid.

    Args:
        axes: ranks along each axis, or along several joined by ``+``. strides: how far apart those ranks are numbered.
    """

    hardware: Hardware
    axes: Mapping[str, Array]
    strides: Mapping[str, Array]

    @staticmethod
    def placed(hardware: Hardware, sizes: Mapping[str, Array], order: tuple[str, ...]) -> "Links":
        """Links of a row-major mesh whose axes are ``order``, major to minor; data axes also together."""
        axes, strides, stride = {}, {}, np.ones(1)
        for axis in reversed(order):
            axes[axis], strides[axis] = sizes[axis], stride
            stride = stride * sizes[axis]
        alone = Links(hardware, axes, strides)
        both = {"dp+ep": sizes["dp"] * sizes["ep"]}
        return Links(hardware, {**axes, **both}, {**strides, "dp+ep": alone.nearest(("dp", "ep"))})

    def nearest(self, axes: Sequence[str]) -> Array:
        """How far apart the nearest ranks are numbered along several axes together; 1 where each has one rank."""
        near = [np.where(self.axes[a] > 1, self.strides[a], np.inf) for a in axes]
        found = reduce(np.minimum, near)
        return np.where(np.isinf(found), 1.0, found)

    def nodes(self, axis: str) -> Array:
        """Nodes along an axis."""
        inside = np.minimum(self.axes[axis], np.maximum(1, self.hardware.node // self.strides[axis]))
        return np.ceil(self.axes[axis] / inside)

    def seconds(self, collective: str, whole: Array, axis: str) -> Array:
        """Seconds of a collective on a value of ``whole`` bytes; zero on one rank."""
        return collective_seconds(self.hardware, collective, whole, self.axes[axis], self.strides[axis])


def send_seconds(hardware: Hardware, count: Any, across: Any) -> Array:
    """Seconds of a message of ``count`` bytes to a neighbour; ``across``: whether such messages leave a node."""
    inner, outer = (tier.base + tier.latency + count / tier.rate("p2p") for tier in (hardware.inner, hardware.outer))
    return np.where(across, outer, inner)


def ring_sums(queries: Any, ways: Any) -> Any:
    """Bytes that a ring moves on each way to add up what its turns give: sums in float32, and a result.

    ``queries``: bytes of a rank's. Forward they are sums of results, backward of gradients.
    """
    return (ways - 1) * 5 * queries / 2


def collective_seconds(hardware: Hardware, collective: str, whole: Any, ways: Any, stride: Any) -> Array:
    """``communication.collective_seconds`` over ``communication.link_between``, in arrays."""
    inner, outer = hardware.inner, hardware.outer
    inside = np.minimum(ways, np.maximum(1, hardware.node // stride))
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
