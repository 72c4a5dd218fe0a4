"""The price of a program: one walk over its unique blocks, for a mesh or for symbols in place of its sizes.

Nothing is overlapped and no kernels are fused, so seconds are an upper bound; ratios between strategies are what they
are for.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.cost import along, communication, compute, copies, experts, memory
from autopar.cost import links as links_of
from autopar.cost.communication import Link
from autopar.cost.compute import Shapes, Value, differentiable, node_cost
from autopar.cost.hardware import Hardware
from autopar.cost.price import BACKWARD, FORWARD, Price, Traffic
from autopar.cost.shares import Sizes, check_priced, layouts, local_shapes, local_value, mesh_sizes
from autopar.cost.symbols import Number, axis_sizes, maximum, product
from autopar.cost.zero import Stage
from autopar.ir import ops
from autopar.ir.layout import I, Layout, R
from autopar.ir.program import Param, Program, Spec, specs, tensor_args

Key = tuple[str, str, str]


@dataclass
class _Bill:
    """Sums of a walk: compute, and (calls, bytes, seconds) of traffic by axis, collective and part of the step."""

    flops: list[Number] = field(default_factory=lambda: [0, 0])
    seconds: list[Number] = field(default_factory=lambda: [0, 0])
    traffic: dict[Key, tuple[int, Number, Number]] = field(default_factory=lambda: defaultdict(lambda: (0, 0, 0)))

    def send(self, key: Key, calls: int, bytes_: Number, seconds: Number) -> None:
        """Add traffic."""
        before = self.traffic[key]
        self.traffic[key] = (before[0] + calls, before[1] + bytes_, before[2] + seconds)

    def add(self, other: "_Bill", times: int) -> None:
        """Add another bill, ``times`` over."""
        self.flops = [a + times * b for a, b in zip(self.flops, other.flops)]
        self.seconds = [a + times * b for a, b in zip(self.seconds, other.seconds)]
        for key, (calls, bytes_, seconds) in other.traffic.items():
            self.send(key, times * calls, times * bytes_, times * seconds)


def price(
    program: Program,
    hardware: Hardware,
    *,
    sizes: Sizes | None = None,
    links: Mapping[str, Link] | None = None,
    training: bool = True,
    zero: Stage | None = None,
) -> Price:
    """What a step of ``program`` costs one rank of ``hardware``.

    Args:
        program: Form RESHARDED; any earlier Form on a mesh of one rank.
        hardware: profile, from ``hardware.load``.
        sizes: ranks of each axis; numbers or symbols; those of the program's mesh where None.
        links: what each axis is connected by; from the mesh's place on nodes where None.
        training: whether backward, gradients and optimizer (AdamW in the parameters' dtype) are counted.
        zero: the engine over the data axes; stage 0 where None.

    Raises AutoparError ``unpriced-form``, ``missing-layout``, ``no-peak``.
    """
    check_priced(program)
    sizes = mesh_sizes(program.mesh) if sizes is None else sizes
    links = Links(program, hardware) if links is None else links
    shapes = local_shapes(sizes)
    total = _Bill()
    for name, graph in program.graphs():
        total.add(_bill(graph, shapes, sizes, links, hardware, training), len(program.calls_of(name)) if name else 1)
    dtype = _dtype(program)
    if training:
        _gradient_sum(total, program, sizes, links, hardware, zero or Stage())
    return Price(
        hardware=hardware.name,
        mesh=str(program.mesh),
        ranks=product(sizes.values()),
        model_flops=_model_flops(program, training),
        flops=(total.flops[0], total.flops[1]),
        compute_seconds=(total.seconds[0], total.seconds[1]),
        traffic=tuple(Traffic(*key, *value) for key, value in sorted(total.traffic.items()) if value[1] != 0),
        memory=_memory(program, shapes, sizes, training, zero or Stage()),
        capacity=hardware.memory_bytes,
        peak=hardware.flops_per_second(dtype),
    )


def closed_form(program: Program, hardware: Hardware, links: Mapping[str, Link] | None = None) -> Price:
    """The same price with a symbol for the size of each axis: valid wherever the program's layouts are.

    ``links``: by axis; inside a node where absent. ``Price.at`` gives its value for sizes.
    """
    names = program.mesh.names
    every = {axis: (links or {}).get(axis, communication.inner_link(hardware)) for axis in names}
    data = "+".join(program.mesh.summed_axes)
    every.setdefault(data, every[program.mesh.summed_axes[0]] if data else communication.inner_link(hardware))
    return price(program, hardware, sizes=axis_sizes(names), links=every)


class Links(dict[str, Link]):
    """Links by axis (or axes joined by ``+``), made when first asked for."""

    def __init__(self, program: Program, hardware: Hardware) -> None:
        super().__init__()
        self._place = (hardware, program.mesh)

    def __missing__(self, axes: str) -> Link:
        self[axes] = communication.link_of(*self._place, *axes.split("+"))
        return self[axes]


def _bill(
    graph: fx.Graph, shapes: Shapes, sizes: Sizes, links: Mapping[str, Link], hardware: Hardware, training: bool
) -> _Bill:
    bill = _Bill()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ops.convert:
            _convert(bill, node, sizes, links, hardware, training)
            continue
        _inside(bill, node, shapes, sizes, links, training)
        _sums(bill, node, shapes, sizes, hardware, training)
        cost = node_cost(node, shapes)
        if cost.kind == "free":
            continue
        seconds = compute.seconds(cost, hardware, work_dtype(node))
        bill.flops[0] = bill.flops[0] + cost.flops
        bill.seconds[0] = bill.seconds[0] + seconds[0]
        if training:
            bill.flops[1] = bill.flops[1] + cost.backward_flops
            bill.seconds[1] = bill.seconds[1] + seconds[1]
    return bill


def converted(node: fx.Node, sizes: Sizes) -> Value:
    """The value of a conversion, whole on its axis and local on the others."""
    spec = specs(node)[0]
    assert isinstance(spec, Spec)
    return local_value(spec, layouts(node)[0].having(compute.bound(node)["axis"], I), sizes)


def _convert(
    bill: _Bill, node: fx.Node, sizes: Sizes, links: Mapping[str, Link], hardware: Hardware, training: bool
) -> None:  # fmt: skip
    """The collectives of one conversion, and what it copies."""
    args, value = compute.bound(node), converted(node, sizes)
    axis, whole = args["axis"], value.bytes
    for when, copy in copies.of_node(node, value, sizes[axis]):
        if training or when == FORWARD:
            way = 0 if when == FORWARD else 1
            bill.seconds[way] = bill.seconds[way] + copies.seconds(copy, sizes[axis], hardware)
    steps = communication.collectives(args["src"], args["dst"])
    for collective, when in zip(steps, (FORWARD, BACKWARD)):
        if collective is None or sizes[axis] == 1 or (when == BACKWARD and not (training and differentiable(node))):
            continue
        sent = communication.collective_bytes(collective, whole, sizes[axis])
        seconds = communication.collective_seconds(collective, whole, sizes[axis], links[axis])
        bill.send((axis, collective, when), 1, sent, seconds)


def sent_inside(node: fx.Node, shapes: Shapes, sizes: Sizes) -> Iterator[tuple[str, str, str, str, Number]]:
    """(axis, what, collective, part of the step, bytes of all ranks) of the messages that an op has inside.

    Ring attention: keys and values around the axis, N-1 times a rank's part; again backward, with their gradients.
    Experts: rows go to their experts and come back, the same in the backward. Reductions and softmaxes along a dim that
    is shared out: all-reduces of what is left of it.
    """
    whens = (FORWARD, BACKWARD) if differentiable(node) else (FORWARD,)
    if node.target is ops.ring_attention:
        args = compute.bound(node)
        axis = args["axis"]
        blocks = [shapes(args[name])[0] for name in ("k", "v")]
        whole: Number = sum(b.bytes * sizes[axis] for b in blocks if b is not None)
        wide = 2 if work_dtype(node).itemsize == 2 else 1  # gradients travel in the dtype of accumulation
        for when in whens:
            yield axis, "ring", "all_gather", when, whole * (1 if when == FORWARD else 1 + wide)
    elif node.target is ops.experts and (found := experts.travel(node, shapes)) is not None:
        axis, *ways = found
        for local in ways:
            for when in whens:
                yield axis, "all_to_all", "all_to_all", when, local * sizes[axis]
    for when, whole in along.messages(node, shapes):
        for dim in along.dims_along(node):
            for axis, _ in layouts(tensor_args(node)[0])[0].shards(dim):
                yield axis, "all_reduce", "all_reduce", when, whole


def _inside(
    bill: _Bill, node: fx.Node, shapes: Shapes, sizes: Sizes, links: Mapping[str, Link], training: bool
) -> None:
    for axis, what, collective, when, whole in sent_inside(node, shapes, sizes):
        if sizes[axis] != 1 and (training or when == FORWARD):
            sent = communication.collective_bytes(collective, whole, sizes[axis])
            seconds = communication.collective_seconds(collective, whole, sizes[axis], links[axis])
            bill.send((axis, what, when), 1, sent, seconds)


def _sums(bill: _Bill, node: fx.Node, shapes: Shapes, sizes: Sizes, hardware: Hardware, training: bool) -> None:
    for when, seconds in enumerate(ring_seconds(node, shapes, sizes, hardware)[: 1 + training]):
        bill.seconds[when] = bill.seconds[when] + seconds


def ring_seconds(node: fx.Node, shapes: Shapes, sizes: Sizes, hardware: Hardware) -> tuple[Number, Number]:
    """Seconds, forward and backward, in which a ring adds up what its turns give; none for other ops."""
    if node.target is not ops.ring_attention:
        return 0, 0
    args = compute.bound(node)
    queries = shapes(args["q"])[0]
    assert queries is not None
    moved = links_of.ring_sums(queries.bytes, sizes[args["axis"]])
    seconds = moved / (hardware.memory_bandwidth * hardware.memory_efficiency)
    return seconds, seconds if differentiable(node) else 0


def work_dtype(node: fx.Node) -> torch.dtype:
    """The dtype that an op computes in: the first floating one of its results and inputs."""
    found: Iterator[Spec | None] = (s for n in (node, *node.all_input_nodes) for s in specs(n))
    return next((s.dtype for s in found if isinstance(s, Spec) and s.is_float), torch.float32)


def _dtype(program: Program) -> torch.dtype:
    """The dtype of most parameter bytes."""
    count: dict[torch.dtype, int] = defaultdict(int)
    for param in _trained(program):
        count[param.spec.dtype] += param.spec.bytes
    return max(count, key=lambda d: count[d], default=torch.float32)


def _model_flops(program: Program, training: bool) -> Number:
    """Flops of the unsharded model, each op once."""
    total: Number = 0
    for name, graph in program.graphs():
        costs = [node_cost(n) for n in graph.nodes]
        once = sum(c.flops + (c.backward_flops if training else 0) for c in costs)
        total = total + once * (len(program.calls_of(name)) if name else 1)
    return total


def _trained(program: Program) -> Iterator[Param]:
    return (p for p in program.params.values() if p.kind == "parameter" and p.trainable and p.spec.is_float)


def _summed_over(program: Program, param: Param) -> str:
    """The data axes over which the engine sums the parameter's gradient, joined by ``+``."""
    layout = param.layout or Layout()
    return "+".join(a for a in program.mesh.summed_axes if layout.get(a, R) == R)


def _gradient_sum(
    bill: _Bill, program: Program, sizes: Sizes, links: Mapping[str, Link], hardware: Hardware, zero: Stage
) -> None:  # fmt: skip
    """The engine's collectives, one for all parameters with the same data axes: 2Ψ(N-1)/N at stage 0.

    Buckets add latency only. At stages that gather, frozen parameters are left out.
    """
    groups: dict[str, list[Number]] = defaultdict(lambda: [0, 0])
    for param in _trained(program):
        inside = bool((zero.units or {}).get(param.name))
        value = local_value(param.spec, param.layout or Layout(), sizes)
        groups[_summed_over(program, param)][0 if inside else 1] += value.bytes
    width = _dtype(program).itemsize
    for axes, (inner, outer) in groups.items():
        ways = product(sizes[a] for a in axes.split("+") if a)
        if not axes or ways == 1:
            continue
        for collective, when, whole, again in zero.sent(inner, outer, width):
            own, link = ways, links[axes]
            if zero.shard is not None:
                own = ways / zero.shard if again else zero.shard
                link = communication.shard_link(hardware, program.mesh, axes.split("+"), zero.shard, again)
            sent = communication.collective_bytes(collective, whole, own)
            seconds = communication.collective_seconds(collective, whole, own, link)
            bill.send((axes, str(collective), when), 1, sent, seconds)


def _gathered(program: Program, sizes: Sizes, zero: Stage) -> dict[str, Number]:
    """Bytes of gathered parameters, where the engine gathers any."""
    groups: dict[str, Number] = defaultdict(int)
    for param in program.params.values():
        if param.kind == "parameter" and param.spec.is_float:
            unit = (zero.units or {}).get(param.name, "")
            groups[unit] += local_value(param.spec, param.layout or Layout(), sizes).bytes
    found = zero.gathered(groups, _dtype(program).itemsize)
    return {"gathered": found} if found != 0 else {}


def _memory(program: Program, shapes: Shapes, sizes: Sizes, training: bool, zero: Stage) -> dict[str, Number]:
    held = memory.States()
    frozen: Number = 0
    for param in program.params.values():
        value = local_value(param.spec, param.layout or Layout(), sizes)
        if training and param.kind == "parameter" and param.trainable and param.spec.is_float:
            held = held + memory.states(value.numel, memory.adamw(param.spec.dtype))
        else:
            frozen = frozen + value.bytes
    ways = product(sizes[a] for a in program.mesh.summed_axes)
    held = zero.held(held, ways)
    kinds = {"parameters": held.parameters + frozen, "gradients": held.gradients, "optimizer": held.optimizer}
    gathered = _gathered(program, sizes, zero) if ways != 1 or zero.low else {}
    kept = {"activations": memory.activations(program, shapes) if training else 0}
    return {**kinds, **gathered, **kept, **_workspace(program, shapes)}


def _workspace(program: Program, shapes: Shapes) -> dict[str, Number]:
    """Bytes of the largest dispatch of rows to experts, where there is one; layers run one after the other."""
    found = experts.dispatches((n for _, graph in program.graphs() for n in graph.nodes), shapes)
    return {"workspace": maximum(*found.values())} if found else {}
