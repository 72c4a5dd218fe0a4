"""What the solver pays, in microseconds, from the cost model."""

from collections.abc import Callable
from functools import lru_cache

from torch import fx

from autopar.cost.along import messages
from autopar.cost.communication import collective_seconds, link_of
from autopar.cost.communication import seconds as conversion_seconds
from autopar.cost.compute import node_cost
from autopar.cost.compute import seconds as compute_seconds
from autopar.cost.experts import rows_bytes
from autopar.cost.hardware import Hardware
from autopar.ir import ops
from autopar.ir.layout import Shard, Type
from autopar.ir.mesh import Mesh
from autopar.rules.relation import Assignment
from autopar.rules.strategies import talks
from autopar.rules.table import SPREAD, relation
from autopar.solve.flow import Flow

MICRO = 1e6
UNEVEN = 1.02  # an uneven shard waits for its longest piece, and experts for those that are chosen most
LOCAL = 1e-3  # µs: a conversion that moves nothing is not free, or ties would add it at random


def op_prices(
    flow: Flow, hardware: Hardware, mesh: Mesh, axis: str, shares: dict[int, float]
) -> Callable[[fx.Node, Assignment], float]:
    """Forward and backward time of an op: its whole time over the axis where it is sharded, and what it sends itself.

    ``shares`` is what other axes leave of each value.
    """
    ways = mesh.size(axis)

    @lru_cache(maxsize=None)
    def whole(node: fx.Node) -> float:
        dtype = node.meta["spec"].dtype if not isinstance(node.meta["spec"], tuple) else node.meta["spec"][0].dtype
        return float(sum(compute_seconds(node_cost(node), hardware, dtype))) * MICRO

    @lru_cache(maxsize=None)
    def travel(node: fx.Node) -> float:
        """Of rows that go to their experts and come back."""
        both, share = (2 if node.meta.get("diff") else 1), shares.get(flow.inputs(node)[0], 1.0)
        sent = (b * share for b in rows_bytes(node))
        link = link_of(hardware, mesh, axis)
        return both * UNEVEN * MICRO * sum(float(collective_seconds("all_to_all", b, ways, link)) for b in sent)

    @lru_cache(maxsize=None)
    def reduced(node: fx.Node) -> float:
        """Of what is left of a dim that an op runs along."""
        out = flow.outputs(node)[0]
        share, link = shares.get(-1 if out is None else out, 1.0), link_of(hardware, mesh, axis)
        sent = (b * share for _, b in messages(node))
        return MICRO * sum(float(collective_seconds("all_reduce", b, ways, link)) for b in sent)

    def price(node: fx.Node, a: Assignment) -> float:
        shards = [t for t in (*a.inputs, *a.outputs) if isinstance(t, Shard)]
        if not shards:
            return whole(node)
        chosen = node.target is ops.experts and isinstance(a.inputs[3], Shard) and a.inputs[3].dim == 0
        sent = travel(node) if chosen and isinstance(a.inputs[0], Shard) else 0.0
        sent += reduced(node) if node.target in SPREAD and talks(relation(node), a) else 0.0
        return sent + whole(node) / ways * (1.0 if all(s.even for s in shards) and not chosen else UNEVEN)

    return price


def conversion_prices(
    flow: Flow, hardware: Hardware, mesh: Mesh, axis: str, shares: dict[int, float]
) -> Callable[[int, Type, Type], float]:
    """Forward and backward time of a conversion; ``shares`` is what other axes leave of each value."""
    link, ways = link_of(hardware, mesh, axis), mesh.size(axis)

    @lru_cache(maxsize=None)
    def price(value: int, src: Type, dst: Type) -> float:
        v = flow.values[value]
        forward, backward = conversion_seconds(src, dst, v.spec.bytes * shares.get(value, 1.0), ways, link)
        uneven = any(isinstance(t, Shard) and not t.even for t in (src, dst))
        return (float(forward) + (float(backward) if v.diff else 0.0)) * MICRO * (UNEVEN if uneven else 1.0) + LOCAL

    return price
