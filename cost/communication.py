"""Bytes on the wire and seconds of a change of layout: the conversion table of the design, forward and backward.

Every function takes plain numbers or sympy expressions for bytes and ways. Bytes are those that one rank sends, for
b bytes of the whole value on N ranks; ring algorithms send the least that is possible, so no algorithm enters here.
Uneven shards are priced as even ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.hardware import Hardware, Tier
from autopar.cost.links import inside
from autopar.cost.symbols import Number, ratio, several
from autopar.ir.layout import Invariant, Partial, Replicated, Shard, Type
from autopar.ir.mesh import Mesh

Step = str | None
"""A collective, or None where a conversion moves nothing between ranks."""

CONVERSIONS: dict[tuple[type, type], tuple[Step, Step]] = {
    (Shard, Replicated): ("all_gather", "reduce_scatter"),
    (Shard, Invariant): ("all_gather", None),
    (Shard, Partial): (None, None),
    (Invariant, Replicated): (None, "all_reduce"),
    (Invariant, Shard): (None, "all_gather"),
    (Invariant, Partial): (None, None),
    (Replicated, Shard): (None, None),
    (Replicated, Invariant): (None, None),
    (Replicated, Partial): (None, None),
    (Partial, Invariant): ("all_reduce", None),
    (Partial, Replicated): ("all_reduce", "all_reduce"),
    (Partial, Shard): ("reduce_scatter", "all_gather"),
}
"""Collectives of a change of type, forward and backward; from one shard to another, see ``collectives``."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Link:
    """What the ranks along one mesh axis reach each other through.

    Args:
        rates: bytes per second and rank by collective. latency: seconds a step, inside a node.
        network_latency: seconds a step between nodes. base: seconds a collective.
        nodes: nodes along the axis; 1 where it stays inside one.
        steps: seconds a step, inside and between nodes, of collectives that take another time.
    """

    rates: Mapping[str, float]
    latency: float
    network_latency: float
    base: float
    nodes: int = 1
    steps: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def collectives(src: Type, dst: Type) -> tuple[Step, Step]:
    """The collectives that the conversion ``src`` → ``dst`` issues forward and backward.

    A shard that moves to another dim is one all-to-all; to another digit of the same dim, it is gathered and sliced,
    both ways.
    """
    if src == dst:
        return None, None
    if isinstance(src, Shard) and isinstance(dst, Shard):
        return ("all_to_all", "all_to_all") if src.dim != dst.dim else ("all_gather", "all_gather")
    return CONVERSIONS[type(src), type(dst)]


def collective_bytes(collective: Step, whole: Number, ways: Number) -> Number:
    """Bytes that one rank sends in ``collective`` on a value of ``whole`` bytes over ``ways`` ranks."""
    if collective is None:
        return 0
    if collective == "all_to_all":
        return ratio(whole * (ways - 1), ways**2)
    return ratio((2 if collective == "all_reduce" else 1) * whole * (ways - 1), ways)


def wire_bytes(src: Type, dst: Type, whole: Number, ways: Number) -> tuple[Number, Number]:
    """Bytes that one rank sends for the conversion, forward and backward. ``whole``: bytes of the global value."""
    forward, backward = collectives(src, dst)
    return collective_bytes(forward, whole, ways), collective_bytes(backward, whole, ways)


def collective_seconds(collective: Step, whole: Number, ways: Number, link: Link) -> Number:
    """Seconds of ``collective``: α a step and bytes over the rate that it reaches.

    Steps of a ring, as in NCCL's model (``ncclTopoTuneModel``): N-1, twice that for all-reduce, of which one for each
    node boundary goes at the network's latency. Zero on one rank.
    """
    if collective is None or ways == 1:
        return 0
    rounds = 2 if collective == "all_reduce" else 1
    outside = rounds * (link.nodes - 1)
    near, far = link.steps.get(collective, (link.latency, link.network_latency))
    steps = (rounds * (ways - 1) - outside) * near + outside * far
    return steps + several(ways) * link.base + collective_bytes(collective, whole, ways) / link.rates[collective]


def seconds(src: Type, dst: Type, whole: Number, ways: Number, link: Link) -> tuple[Number, Number]:
    """Seconds of the conversion, forward and backward; local copies are free here."""
    forward, backward = collectives(src, dst)
    return collective_seconds(forward, whole, ways, link), collective_seconds(backward, whole, ways, link)


def link_of(hardware: Hardware, mesh: Mesh, *axes: str) -> Link:
    """The link of a mesh axis, or of several taken together, ranks being placed on nodes in row-major order.

    An axis that leaves the node rings through the adapters of all its ranks inside a node, so the network's rate
    counts once for each of them, up to the rate inside. Hence tp inside a node and dp across come out as expected.
    A user's axis that was split is the link of its parts together.
    """
    return link_with(hardware, *_placed(hardware, mesh, axes))


def shard_link(hardware: Hardware, mesh: Mesh, axes: Sequence[str], shard: int, copies: bool) -> Link:
    """The link of the nearest ``shard`` ranks along several axes; ``copies``: of those that have the same shard."""
    ways, near = _placed(hardware, mesh, axes)
    if copies:
        return link_with(hardware, ways // shard, math.gcd(ways // shard, max(1, near // shard)))
    return link_with(hardware, shard, math.gcd(shard, near))


def _placed(hardware: Hardware, mesh: Mesh, axes: Sequence[str]) -> tuple[int, int]:
    """Ranks along several axes together, and how many of them share a node."""
    members, stride, placed = {part for axis in axes for part in (mesh.parts(axis) or (axis,))}, 1, []
    for name, size in reversed(mesh.axes):
        placed += [(size, stride)] if name in members else []
        stride *= size
    return math.prod(n for n, _ in placed), int(inside(hardware.node, placed, mesh.world).item())


def link_between(hardware: Hardware, ways: int, stride: int = 1) -> Link:
    """The link of ``ways`` ranks whose numbers are ``stride`` apart, in a mesh of as many ranks as they span."""
    return link_with(hardware, ways, int(inside(hardware.node, [(ways, stride)], ways * stride).item()))


def link_with(hardware: Hardware, ways: int, inside: int) -> Link:
    """The link of ``ways`` ranks of which ``inside`` share a node."""
    inner, outer = hardware.inner, hardware.outer
    nodes = -(-ways // inside)
    if nodes == 1:
        return _link(inner, {c: inner.rate(c) for c in COLLECTIVES})
    rates = {c: outer.rate(c) if inside == 1 else min(inner.rate(c), inside * outer.rate(c)) for c in COLLECTIVES}
    slowest = max((inside - 1) / inner.rate("all_to_all"), (ways - inside) / outer.rate("all_to_all"))
    rates["all_to_all"] = (ways - 1) / slowest  # each rank reaches ranks of other nodes through its own adapter
    latency = inner.latency if inside > 1 else outer.latency
    steps = {c: (inner.step(c), outer.step(c)) for c in (*inner.steps, *outer.steps)}
    return Link(rates, latency, outer.latency, max(inner.base, outer.base), nodes, steps)


def inner_link(hardware: Hardware) -> Link:
    """The link inside a node, whatever the number of ranks: for closed forms."""
    return _link(hardware.inner, {c: hardware.inner.rate(c) for c in COLLECTIVES})


def outer_link(hardware: Hardware) -> Link:
    """The link of ranks that all sit on different nodes: for closed forms."""
    return _link(hardware.outer, {c: hardware.outer.rate(c) for c in COLLECTIVES})


def _link(tier: Tier, rates: Mapping[str, float]) -> Link:
    return Link(rates, tier.latency, tier.latency, tier.base, steps={c: (t, t) for c, t in tier.steps.items()})
