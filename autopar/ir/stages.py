"""What each stage of a pipeline computes, and what crosses from one to the next.

Nodes of the outer graph are of three kinds. What depends on inputs, buffers and constants alone is *free*: every rank
has those, so each stage that reads such a value (a mask, positions, a rotation table) makes it itself. What depends on
parameters but on no input is *light*, unless a matrix product makes it: it is made where it is read, too, and its
parameters live in each of those stages. Everything else is *staged*: one stage makes it, and it is sent on from
neighbour to neighbour as far as it is read.
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.describe import MATMULS, op_name
from autopar.ir.program import Program, Spec

FREE, CONSTANT, LIGHT, STAGED = "free", "constant", "light", "staged"


@dataclass(frozen=True)
class Crossing:
    """A value that is sent from a stage to the next. ``grad``: whether its gradient is sent back."""

    name: str
    spec: Spec
    grad: bool


@dataclass(frozen=True)
class Part:
    """What one stage computes: ``graph`` takes inputs, received values, parameters and handles.

    Args:
        index: of the stage.
        graph: returns the values of ``sent``, then those of ``outputs``.
        inputs: indices into ``Program.inputs`` of what it takes first.
        received: what it takes after those.
        outputs: indices into ``Program.outputs``.
        params: names of the parameters, buffers and constants that it reads.
    """

    index: int
    graph: fx.Graph
    inputs: tuple[int, ...]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]
    outputs: tuple[int, ...]
    params: tuple[str, ...]

    def program(self, program: Program) -> Program:
        """The program of this stage alone."""
        used = {str(n.target) for n in self.graph.nodes if n.op == "call_module"}
        blocks = {name: block for name, block in program.blocks.items() if name in used}
        return replace(program, graph=self.graph, blocks=blocks, outputs=())


def kinds(program: Program) -> dict[fx.Node, str]:
    """The kind of every node of the outer graph but its output."""
    found: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if node.op != "output":
            found[node] = _kind(program, node, {found[n] for n in node.all_input_nodes})
    return found


def _kind(program: Program, node: fx.Node, reads: set[str]) -> str:
    if node.op == "placeholder":
        if "param" in node.meta:
            return LIGHT if program.params[str(node.meta["param"])].kind == "parameter" else CONSTANT
        return CONSTANT if "handle" in node.meta else FREE
    if node.op == "call_module" or STAGED in reads or {LIGHT, FREE} <= reads:
        return STAGED
    if LIGHT in reads:
        return STAGED if op_name(node) in MATMULS else LIGHT
    return FREE if FREE in reads else CONSTANT


def grads(program: Program) -> set[fx.Node]:
    """The nodes of the outer graph through which a gradient reaches a trainable parameter."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" and "param" in node.meta:
            param = program.params[str(node.meta["param"])]
            flows = param.kind == "parameter" and param.trainable and param.spec.is_float
        else:
            may = node.op == "call_module" or bool(node.meta.get("diff", True))
            spec = node.meta.get("spec")
            floats = any(s is not None and s.is_float for s in (spec if isinstance(spec, tuple) else (spec,)))
            flows = may and floats and (any(n in found for n in node.all_input_nodes) or _trains(program, node))
        if flows:
            found.add(node)
    return found


def _trains(program: Program, node: fx.Node) -> bool:
    """Whether a call reads a trainable parameter by its path."""
    own = (program.params[name] for _, name in program.own(node)) if node.op == "call_module" else ()
    return any(p.kind == "parameter" and p.trainable and p.spec.is_float for p in own)


def stage_of(program: Program) -> dict[fx.Node, int]:
    """The stage of every staged node: its mark, or the last stage that it reads from where a pass added it later."""
    kind, found = kinds(program), dict[fx.Node, int]()
    for node in program.graph.nodes:
        if kind.get(node) == STAGED:
            before = max((found[n] for n in node.all_input_nodes if n in found), default=0)
            found[node] = before if node.target is operator.getitem else max(before, int(node.meta.get("stage", 0)))
    return found


def parts_of(program: Program) -> list[Part]:
    """What each stage computes. ``Program.stages`` must be set."""
    assert program.stages is not None
    return _Cut(program, len(program.stages.names)).parts()


class _Cut:
    """The outer graph with the stage of each node."""

    def __init__(self, program: Program, count: int) -> None:
        self.program, self.count = program, count
        self.stage, self.grads = stage_of(program), grads(program)
        self.nodes = list(program.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.results: list[fx.Node] = list(self.nodes[-1].args[0])
        last = {n: max((self.stage.get(u, 0) for u in n.users), default=0) for n in self.stage}
        for node, home in zip(self.results, self.homes()):
            last[node] = max(last.get(node, 0), home)
        self.last = last

    def homes(self) -> list[int]:
        """The stage that returns each output: the one that makes it; the last returns the loss, and what is free."""
        end = self.count - 1
        return [
            end if o.kind == "loss" else self.stage.get(node, end)
            for o, node in zip(self.program.outputs, self.results)
        ]

    def crossing(self, cut: int) -> list[fx.Node]:
        """The values that go from stage ``cut`` to the next."""
        if not 0 <= cut < self.count - 1:
            return []
        return [n for n in self.nodes if n in self.stage and self.stage[n] <= cut < self.last[n]]

    def parts(self) -> list[Part]:
        return [self.part(s) for s in range(self.count)]

    def part(self, stage: int) -> Part:
        received, sent = self.crossing(stage - 1), self.crossing(stage)
        outputs = [i for i, home in enumerate(self.homes()) if home == stage]
        roots = [*sent, *(self.results[i] for i in outputs)]
        needed = self._needed(roots, set(received))
        heads = [n for n in self.nodes if n.op == "placeholder" and n in needed]
        inputs = [n for n in heads if not {"param", "handle"} & n.meta.keys()]
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            env[node] = self._copied(graph, node, env)
        for node in received:
            env[node] = graph.placeholder(node.name)
            env[node].meta = {k: v for k, v in node.meta.items() if k in ("spec", "layout", "global", "diff", "module")}
            env[node].meta["received"] = True
        for node in self.nodes:
            if node in needed and node not in env:
                env[node] = self._copied(graph, node, env)
        graph.output(tuple(env[n] for n in roots))
        calls = (n for n in self.nodes if n in needed and n.op == "call_module")
        own = (name for call in calls for _, name in self.program.own(call))
        return Part(
            stage, graph, tuple(int(n.meta["input"]) for n in inputs),
            tuple(map(self._crossing, received)), tuple(map(self._crossing, sent)), tuple(outputs),
            tuple(dict.fromkeys((*(str(n.meta["param"]) for n in heads if "param" in n.meta), *own))),
        )  # fmt: skip

    def _needed(self, roots: Iterable[fx.Node], received: set[fx.Node]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        todo = [n for n in roots if n not in received]
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo += [n for n in node.all_input_nodes if n not in received]
        return needed

    @staticmethod
    def _copied(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        new = graph.node_copy(node, lambda n: env[n])
        new.meta = dict(node.meta)
        return new

    def _crossing(self, node: fx.Node) -> Crossing:
        return Crossing(node.name, node.meta["spec"], node in self.grads)


def crossings(program: Program) -> Iterator[tuple[Crossing, ...]]:
    """For each cut, what goes from one stage to the next."""
    assert program.stages is not None
    cut = _Cut(program, len(program.stages.names))
    for c in range(cut.count - 1):
        yield tuple(cut._crossing(n) for n in cut.crossing(c))
