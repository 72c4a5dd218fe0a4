"""A family: one set of layouts, and what each piece of the model costs under it, as functions of all sizes.

A program is lowered once, with a batch and a sequence whose sizes are twice a prime that no size of the model has.
Every size that is a multiple of such a prime belongs to the batch or the sequence, so that one walk over the unique
blocks gives closed forms in rows ``b`` and positions ``s`` that a rank holds of a microbatch, and in the axis sizes.
They hold wherever the layouts do: ``Family.allows``.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import sympy
from torch import fx

from autopar.cost import along, communication, copies, experts
from autopar.cost.closed import Copies, Family, Kernel, Message, Unit
from autopar.cost.compute import Shapes, Value, bound, differentiable
from autopar.cost.keep import FIRST, LAST, gathers, keeps
from autopar.cost.kernels import kernels
from autopar.cost.price import BACKWARD, FORWARD
from autopar.cost.shares import layouts, local_value
from autopar.cost.symbols import Number, axis_sizes, product, ratio
from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import I, Layout, R, Shard, Type
from autopar.ir.mesh import KNOWN_AXES, TIME
from autopar.ir.program import Program, Spec, specs, tensor_args

ROWS = sympy.Symbol("b", integer=True, positive=True)
POSITIONS = sympy.Symbol("s", integer=True, positive=True)
AXES = axis_sizes(KNOWN_AXES)


class Sizes(Protocol):
    """What the sizes of a program stand for."""

    @property
    def axes(self) -> Mapping[str, Number]:
        """Ranks along each axis of its mesh."""

    @property
    def positions(self) -> int | None:
        """Of the example's rows; None where they have none."""

    @property
    def own(self) -> bool:
        """Whether the program has its context ranks, so that no formula is needed for what they do."""

    def size(self, length: int) -> Number:
        """A global size, as closed forms have it."""

    def place(self, axis: str) -> tuple[str, tuple[int, int] | None]:
        """The user's axis, and of a part of it how many ranks it has, and how far apart they are numbered there."""


@dataclass(frozen=True)
class Primes:
    """Sizes by which batch and sequence are known: the example has twice as many positions, and rows on each data rank.

    Args:
        data: axes that carry data. ways: data ranks of the example.
    """

    rows: int
    positions: int | None = None
    data: tuple[str, ...] = ("dp",)
    ways: int = 2
    own: ClassVar[bool] = False

    @property
    def axes(self) -> Mapping[str, Number]:
        """A symbol for each axis."""
        return AXES

    def place(self, axis: str) -> tuple[str, tuple[int, int] | None]:
        """The axis: two tensor ranks are never split."""
        return axis, None

    @staticmethod
    def apart(sizes: Iterable[int], longest: int | None) -> "Primes":
        """Primes that divide none of the model's sizes. ``longest``: sequence to come close to, None for no sequence.

        Raises AutoparError ``no-example-sizes``.
        """
        known = set(sizes)
        free = [p for p in sympy.primerange(5, max(600, longest or 0)) if not any(n % p == 0 for n in known if n)]
        rows = next((p for p in free if p >= 29), None)
        positions = next((p for p in reversed(free) if 2 * p <= (longest or 0) and p != rows), None)
        if rows is None or (positions is None and longest is not None):
            raise AutoparError(
                "no-example-sizes", "the model has sizes that every small prime divides", "a longer sequence"
            )
        return Primes(rows, positions)

    def size(self, length: int) -> Number:
        """A global size in symbols; positions are those of one context rank."""
        out: Number = 1
        near = length - 2 * (self.positions or 0)
        if self.positions and near in (-1, 1):
            return POSITIONS + near
        rows = ROWS * ratio(product(AXES[a] for a in self.data), self.ways)
        for prime, whole in ((self.rows, rows), (self.positions, ratio(POSITIONS, 2))):
            while prime and length and length % prime == 0:
                length //= prime
                out = out * whole
        return length * out


def family(
    program: Program,
    sizes: Sizes,
    *,
    sequence: bool = False,
    fused: bool = False,
    regather: bool = False,
    parts: bool = True,
) -> Family:
    """The family of a RESHARDED program whose example inputs have the sizes that ``sizes`` tells of.

    Args:
        sequence: whether positions are sharded over tp. fused: whether pointwise chains are one kernel each.
        regather: whether activations that were gathered are kept as shards and gathered again in the backward; systems
            that do so have positions as the leading dim, and no copies beside their collectives.
        parts: whether a step can run in microbatches.
    """
    shapes = shapes_of(sizes)
    names = list(program.blocks)
    sides = sides_of(program)
    kept = keeps(program, shapes, sides, fused, regather)
    parameters = _parameters(program, sizes, sides)
    units = [
        _unit(name, runs, len(program.calls_of(name)) or 1, shapes, parameters[name], kept[name], fused, regather,
              sizes, sequence)
        for name, runs in _pieces(program, sides)
    ]  # fmt: skip
    order = tuple(1 + names.index(str(c.target)) for c in program.calls())
    tied, length = _tied(program, sizes, sides), sizes.positions is not None
    return Family(sequence, tuple(units), order, _divisors(program), tied, length, parts, sizes.own)


def shapes_of(sizes: Sizes) -> Shapes:
    """From a node to its values on one rank."""

    def shapes(node: fx.Node) -> tuple[Value | None, ...]:
        pairs = zip(specs(node), layouts(node), strict=True)
        return tuple(_value(s, layout, sizes) if isinstance(s, Spec) else None for s, layout in pairs)

    return shapes


def sides_of(program: Program) -> dict[fx.Node, str]:
    """The unit of each node of the outer graph: ``first`` before the first call of a block, ``last`` behind the last.

    What stands between two calls belongs to the block of the later one.
    """
    first = next(program.calls(), None)
    out, side = {}, LAST
    for node in reversed(program.graph.nodes):
        if node.op == "call_module":
            side = FIRST if node is first else str(node.target)
        out[node] = side
    return {node: FIRST if first is None else out[node] for node in program.graph.nodes}


def _value(spec: Spec, layout: Layout, sizes: Sizes) -> Value:
    shape = tuple(sizes.size(n) for n in spec.shape)
    return local_value(Spec(shape, spec.dtype), layout, sizes.axes)  # type: ignore[arg-type]


Run = tuple[fx.Graph, frozenset[fx.Node], Number]  # a graph, some nodes, how often they run in a call


def _pieces(program: Program, sides: dict[fx.Node, str]) -> Iterator[tuple[str, list[Run]]]:
    outer: dict[str, set[fx.Node]] = defaultdict(set)
    for node, side in sides.items():
        outer[side].add(node)
    yield FIRST, [(program.graph, frozenset(outer[FIRST]), 1)]
    for name, block in program.blocks.items():
        own = (block.graph, frozenset(block.graph.nodes), 1)
        yield name, [own, (program.graph, frozenset(outer[name]), 1 / len(program.calls_of(name)))]
    yield LAST, [(program.graph, frozenset(outer[LAST]), 1)]


def _unit(
    name: str, runs: list[Run], calls: int, shapes: Shapes, parameters: dict[str, Number], kept: dict[str, Number],
    fused: bool, regather: bool, sizes: Sizes, sequence: bool,
) -> Unit:  # fmt: skip
    given = _of_inputs(runs[-1][0])
    count: dict[Kernel, float] = defaultdict(int)
    messages: dict[Message, float] = defaultdict(int)
    copied: dict[Copies, float] = defaultdict(int)
    heads: list[Number] = [0, 0]
    inside = ops.ring_attention if sizes.own else ops.attention
    for graph, nodes, times in runs:
        for node, kernel in kernels(graph, shapes, fused) if nodes else ():
            count[kernel] += times if node in nodes else 0
        for node in nodes:
            for message in (*_messages(node, shapes, sizes, regather), *_inside(node, shapes, sizes)):
                messages[replace(message, given=node in given)] += times
            for copy in () if regather else _copies(node, shapes, sizes, sequence):
                copied[copy] += times
            if node.target is inside:
                heads[0] += times * _bytes(node, "q", shapes)
                heads[1] += times * sum(_bytes(node, a, shapes) for a in "kv")
    work = tuple((times, kernel) for kernel, times in count.items() if times)
    sent = tuple(sorted((replace(m, calls=n) for m, n in messages.items()), key=str))
    passed = tuple(sorted((replace(c, calls=n) for c, n in copied.items()), key=str))
    held = {name: kept[name] for name in ("none", "selective", "full", "again", "sent", "scores", "transient", "alone")}
    rows = experts.dispatches((n for _, nodes, _ in runs for n in nodes), shapes)
    return Unit(name, calls, work, sent, parameters, held, kept["hidden"], (heads[0], heads[1]), rows, passed)


def _of_inputs(outer: fx.Graph) -> set[fx.Node]:
    """What depends on no parameter and on no block, in the outer graph."""
    found: set[fx.Node] = set()
    for node in outer.nodes:
        if node.op == "placeholder":
            found |= set() if "param" in node.meta else {node}
        elif node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _bytes(node: fx.Node, name: str, shapes: Shapes) -> Number:
    value = shapes(bound(node)[name])[0]
    assert value is not None
    return value.bytes


def _messages(node: fx.Node, shapes: Shapes, sizes: Sizes, regather: bool) -> Iterator[Message]:
    """The collectives of a conversion, of the value that is whole on its axis; none of other nodes."""
    if node.target is not ops.convert or bound(node)["axis"] == TIME:
        return
    args, whole = bound(node), _whole(node, shapes, sizes).bytes
    axis, part = sizes.place(args["axis"])
    for collective, when in zip(communication.collectives(args["src"], args["dst"]), (FORWARD, BACKWARD)):
        if collective is not None and (when == FORWARD or differentiable(node)):
            yield Message(axis, collective, when, whole, part=part)
    if regather and gathers(node) and differentiable(node):
        yield Message(axis, "all_gather", BACKWARD, whole, again=True)


def _copies(node: fx.Node, shapes: Shapes, sizes: Sizes, sequence: bool) -> Iterator[Copies]:
    """What a conversion copies; nothing of other nodes. Along cp, tp shares out positions in two runs (zigzag order).

    ``sequence``: whether positions are sharded over tp.
    """
    positions = sizes.positions if sequence and not sizes.own else None

    def in_two(kind: Type) -> Type:
        if not isinstance(kind, Shard) or len(kind.pieces) > 1 or not positions or kind.length % positions:
            return kind
        own = kind.pieces[0]
        return Shard(kind.dim, (own.over(2 * own.length, own.inner),))

    if node.target is not ops.convert or bound(node)["axis"] == TIME:
        return
    name, whole = bound(node)["axis"], _whole(node, shapes, sizes)
    axis, _ = sizes.place(name)
    plain = [Copies(axis, w, c.bytes, c.major) for w, c in copies.of_node(node, whole, sizes.axes[name])]
    turned = plain
    if positions and axis == "tp":
        turned = [Copies(axis, w, c.bytes, c.major) for w, c in copies.of_node(node, whole, AXES[axis], in_two)]
    same = plain == turned
    yield from (replace(c, context=None if same else False) for c in plain)
    yield from () if same else (replace(c, context=True) for c in turned)


def _whole(node: fx.Node, shapes: Shapes, sizes: Sizes) -> Value:
    """The value of a conversion, whole on its axis."""
    args, value = bound(node), shapes(node)[0]
    assert value is not None
    dst, shape = args["dst"], list(value.shape)
    if isinstance(dst, Shard):
        shape[dst.dim] = shape[dst.dim] * sizes.axes[args["axis"]]
    return Value(tuple(shape), value.dtype)


def _inside(node: fx.Node, shapes: Shapes, sizes: Sizes) -> Iterator[Message]:
    """Rows that go to their experts and come back, the same in the backward; what reductions along a shard send."""
    found = experts.travel(node, shapes) if node.target is ops.experts else None
    if found is not None:
        axis, *ways = found
        for local in ways:
            for when in (FORWARD, BACKWARD) if differentiable(node) else (FORWARD,):
                yield Message(axis, "all_to_all", when, local * sizes.axes[axis])
    for when, whole in along.messages(node, shapes):
        for dim in along.dims_along(node):
            for name, _ in layouts(tensor_args(node)[0])[0].shards(dim):
                axis, part = sizes.place(name)
                yield Message(axis, "all_reduce", when, whole, part=part)


def _owners(program: Program, sides: dict[fx.Node, str]) -> dict[str, frozenset[str]]:
    """The units that read each parameter."""
    found: dict[str, set[str]] = defaultdict(set)
    for node, names in program.readers():
        side = sides.get(node, "")
        for name in names if node in sides else ():
            found[name].add(str(node.target) if node.op == "call_module" else side)
    return {name: frozenset(units) for name, units in found.items()}


def _parameters(program: Program, sizes: Sizes, sides: dict[fx.Node, str]) -> dict[str, dict[str, Number]]:
    """Elements by unit and by the data axes of their gradient's sum, for one call of the unit."""
    out: dict[str, dict[str, Number]] = {n: defaultdict(int) for n in (FIRST, *program.blocks, LAST)}
    for name, units in _owners(program, sides).items():
        param = program.params[name]
        if param.kind != "parameter" or not param.spec.is_float:
            continue
        layout = param.layout or Layout()
        axes = "+".join(a for a in program.mesh.data_axes if layout.get(a, R) in (R, I))
        for unit in sorted(units):
            calls = len(program.calls_of(unit)) or 1
            out[unit][axes] += ratio(1, calls) * _value(param.spec, layout, sizes).numel
    return {unit: dict(groups) for unit, groups in out.items()}


def _tied(program: Program, sizes: Sizes, sides: dict[fx.Node, str]) -> Number:
    owners = _owners(program, sides)
    shared = [program.params[n] for n, units in owners.items() if {FIRST, LAST} <= units]
    both = [p for p in shared if p.kind == "parameter"]
    return sum(_value(p.spec, p.layout or Layout(), sizes).numel for p in both)


def _divisors(program: Program) -> dict[str, frozenset[int]]:
    """By axis, the lengths of parameters' dims that it cut in equal parts, and of tp the heads of every attention.

    Tensor parallelism refuses heads that do not divide, also where the example's prices left them whole.
    """
    out: dict[str, set[int]] = defaultdict(set)
    for param in program.params.values():
        for axis, shard in (param.layout or Layout()).shards():
            out[axis] |= {p.length // p.outer for p in shard.pieces if p.sizes is None}
    for _, graph in program.graphs():
        for node in graph.nodes:
            for name in ("q", "k") if node.target is ops.attention else ():
                heads = bound(node)[name]
                shape = specs(heads)[0].shape  # type: ignore[union-attr]
                out["tp"] |= {shape[-3]} if name == "q" and len(shape) > 2 else set()
                for axis, shard in layouts(heads)[0].shards():
                    if shard.dim == 1:
                        out[axis].add(shape[1])
    for axis in program.mesh.data_axes:
        out.pop(axis, None) if axis == "dp" else None
    return {axis: frozenset(n) for axis, n in out.items()}
