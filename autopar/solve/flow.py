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
    """One tensor: who makes it, its spec, whether a gradient flows, and how often its graph runs."""

    key: Key
    graph: str
    spec: Spec
    diff: bool
    weight: int
    role: str  # "param", "input", "argument" or "op"
    index: int = 0


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
    for node in placeholders(program.graph):
        _add(flow, node, "", 1, "param" if "param" in node.meta else "input")
    for name, block in program.blocks.items():
        calls = program.calls_of(name)
        for i, node in enumerate(placeholders(block.graph)):
            if "param" in node.meta:
                first = flow.at[calls[0].args[i], 0]  # type: ignore[index]
                flow.values[first].weight = max(1, len(calls))
                flow.at[node, 0] = first
                for call in calls:
                    flow.at[call.args[i], 0] = first  # type: ignore[index]
            else:
                _add(flow, node, name, counts[name], "argument")
        _add_ops(flow, block.graph, name, counts[name])
        for call in calls:
            for i, node in enumerate(block_outputs(block.graph)):
                flow.at[call, i] = flow.of(node)
    _add_ops(flow, program.graph, "", 1)
    flow.groups = list(_groups(flow))
    return flow


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
    heads = {name: placeholders(block.graph) for name, block in flow.program.blocks.items()}
    for name, graph in flow.program.graphs():
        weight = max(1, len(flow.program.calls_of(name))) if name else 1
        found: dict[tuple[int, tuple[Read, ...], tuple[int, ...]], int] = {}
        for key, reads in _readers(flow, graph, name, heads).items():
            ops = tuple(r for r in reads if r.kind != "argument")
            bound = (heads[str(r.node.target)][r.port] for r in reads if r.kind == "argument")
            args = tuple(dict.fromkeys(flow.at[head, 0] for head in bound))
            group = (flow.at[key], ops, args)
            found[group] = found.get(group, 0) + weight
        for (value, ops, args), times in found.items():
            yield Group(value, ops, times, args)


def _readers(flow: Flow, graph: fx.Graph, name: str, heads: dict[str, list[fx.Node]]) -> dict[Key, list[Read]]:
    """What reads each value of the graph. ``heads``: placeholders of each block."""
    readers: dict[Key, list[Read]] = {}
    for node in graph.nodes:
        if is_op(node):
            for port, a in enumerate(tensor_args(node)):
                readers.setdefault(origin(a), []).append(Read("op", node, port))
        elif node.op == "call_module":
            for port, a in enumerate(node.args):
                if flow.values[flow.of(a)].role != "param" or "param" not in heads[str(node.target)][port].meta:
                    readers.setdefault(origin(a), []).append(Read("argument", node, port))
        elif node.op == "output" and not name:
            for port, a in enumerate(node.args[0]):
                if isinstance(a, fx.Node):
                    readers.setdefault(origin(a), []).append(Read("output", node, port))
    return readers
