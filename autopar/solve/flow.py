"""The program as values and readers: what the solver and the candidates walk over.

A value is what one op returns, in the graph that computes it. Parameters of equal layers are one value (their layouts
are chosen together), and a block's outputs are the values inside it. Readers are ops, block arguments and the program's
outputs; a conversion made for one reader serves all readers of that value in that graph.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.program import Program, Spec, specs, tensor_args

Key = tuple[fx.Node, int]


@dataclass
class Value:
    """One tensor: who makes it, its spec, whether a gradient flows, and how often its graph runs.

    A parameter's is made by one of the placeholders that stand for it.
    """

    key: Key
    graph: str
    spec: Spec
    diff: bool
    weight: int
    role: str  # "param", "input", "argument" or "op"
    index: int = 0
    param: str = ""  # of role "param": the name of one of those that it stands for


@dataclass(frozen=True)
class Read:
    """A reader of a value: port ``port`` of op ``node``, a block's argument, or an entry of the outer output."""

    kind: str  # "op", "argument" or "output"
    node: fx.Node
    port: int


@dataclass
class Group:
    """One value's readers in one graph, and how many such groups there are (equal layers)."""

    value: int
    reads: tuple[Read, ...]
    weight: int
    arguments: tuple[int, ...] = ()  # value index of the block argument, for reads of kind "argument"


@dataclass
class Flow:
    """All values, ops and reader groups of a program."""

    program: Program
    values: list[Value] = field(default_factory=list)
    at: dict[Key, int] = field(default_factory=dict)
    ops: list[tuple[fx.Node, int]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    def of(self, node: fx.Node) -> int:
        """Index of the value that ``node`` stands for."""
        return self.at[origin(node)]

    def inputs(self, node: fx.Node) -> list[int]:
        """Values that an op reads, in ``tensor_args`` order."""
        return [self.of(a) for a in tensor_args(node)]

    def outputs(self, node: fx.Node) -> list[int | None]:
        """Values that an op makes; None for what is no tensor."""
        return [self.at.get((node, i)) for i in range(len(specs(node)))]

    def makers(self) -> dict[int, fx.Node]:
        """The op that makes each value which one makes."""
        return {v: node for node, _ in self.ops for v in self.outputs(node) if v is not None}


def origin(node: fx.Node) -> Key:
    """The op and output number behind a node: through ``getitem``."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def block_outputs(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a block returns."""
    out = next(n for n in reversed(graph.nodes) if n.op == "output")
    return list(out.args[0])


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The graph's placeholders in order."""
    return graph.find_nodes(op="placeholder")


def is_op(node: fx.Node) -> bool:
    """Whether the node computes something (``getitem`` only names a part)."""
    return node.op == "call_function" and node.target is not operator.getitem


def flow_of(program: Program) -> Flow:
    """Values, ops and readers of a program."""
    flow = Flow(program)
    counts = {name: len(program.calls_of(name)) for name in program.blocks}
    for held in _parameters(program):
        _add(flow, held.nodes[0], "", held.weight, "param")
        flow.values[-1].param = held.name
        flow.at.update(((node, 0), len(flow.values) - 1) for node in held.nodes)
    for node in placeholders(program.graph):
        if "param" not in node.meta:
            _add(flow, node, "", 1, "input")
    for name, block in program.blocks.items():
        for node in block.taken():
            _add(flow, node, name, counts[name], "argument")
        _add_ops(flow, block.graph, name, counts[name])
        for call in program.calls_of(name):
            for i, node in enumerate(block_outputs(block.graph)):
                flow.at[call, i] = flow.of(node)
    _add_ops(flow, program.graph, "", 1)
    flow.groups = list(_groups(flow))
    return flow


@dataclass
class _Held:
    """Parameters that are laid out alike: those that equal layers read at one place, and all that these are read as.

    Args:
        name: of one of them.
        nodes: the placeholders that stand for them.
        weight: how many they are.
    """

    name: str
    nodes: list[fx.Node]
    weight: int


def _parameters(program: Program) -> list[_Held]:
    """The parameters and buffers that the program reads, in the order of its table."""
    root: dict[fx.Node, fx.Node] = {}
    first: dict[str, fx.Node] = {}  # placeholder by parameter
    weights: dict[fx.Node, int] = {}

    def of(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            node = root[node]
        return node

    for node, name in program.held():
        weights[node] = weights.get(node, 0) + 1
        root.setdefault(node, node)
        if (other := first.setdefault(name, node)) is not node:
            root[of(node)] = of(other)
    held: dict[fx.Node, _Held] = {}
    for name in program.params:
        if name in first and (node := of(first[name])) not in held:
            held[node] = _Held(name, [], 1)
    for node, weight in weights.items():
        own = held[of(node)]
        own.nodes.append(node)
        own.weight = max(own.weight, weight)
    return list(held.values())


def _add(flow: Flow, node: fx.Node, graph: str, weight: int, role: str) -> None:
    for i, spec in enumerate(specs(node)):
        if isinstance(spec, Spec):
            flow.at[node, i] = len(flow.values)
            diff = bool(node.meta.get("diff")) and spec.is_float
            flow.values.append(Value((node, i), graph, spec, diff, weight, role, i))


def _add_ops(flow: Flow, graph: fx.Graph, name: str, weight: int) -> None:
    for node in graph.nodes:
        if is_op(node):
            _add(flow, node, name, weight, "op")
            flow.ops.append((node, weight))


def _groups(flow: Flow) -> Iterator[Group]:
    """Reader groups, equal ones of the outer graph counted together."""
    heads = {name: block.taken() for name, block in flow.program.blocks.items()}
    for name, graph in flow.program.graphs():
        weight = max(1, len(flow.program.calls_of(name))) if name else 1
        found: dict[tuple[int, tuple[Read, ...], tuple[int, ...]], int] = {}
        for key, reads in readers(graph, name).items():
            ops = tuple(r for r in reads if r.kind != "argument")
            bound = (heads[str(r.node.target)][r.port] for r in reads if r.kind == "argument")
            args = tuple(dict.fromkeys(flow.at[head, 0] for head in bound))
            group = (flow.at[key], ops, args)
            found[group] = found.get(group, 0) + weight
        for (value, ops, args), times in found.items():
            yield Group(value, ops, times, args)


def readers(graph: fx.Graph, name: str) -> dict[Key, list[Read]]:
    """What reads each value of the graph."""
    readers: dict[Key, list[Read]] = {}
    for node in graph.nodes:
        if is_op(node):
            for port, a in enumerate(tensor_args(node)):
                readers.setdefault(origin(a), []).append(Read("op", node, port))
        elif node.op == "call_module":
            for port, a in enumerate(node.args):
                assert isinstance(a, fx.Node)
                readers.setdefault(origin(a), []).append(Read("argument", node, port))
        elif node.op == "output" and not name:
            for port, a in enumerate(node.args[0]):
                if isinstance(a, fx.Node):
                    readers.setdefault(origin(a), []).append(Read("output", node, port))
    return readers
