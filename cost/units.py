"""What each unit of a program costs a stage: the pieces that a pipeline may cut between, with seconds and bytes.

A backward is split as schedules split it: I makes the gradients of activations, W those of parameters. A product's two
matmuls go one to each; what only carries parameters (a cast, a gather) is W's, everything else I's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost import communication, compute, copies, links, memory
from autopar.cost.balance import Unit
from autopar.cost.communication import Link
from autopar.cost.compute import NodeCost, Shapes, differentiable, node_cost, op_name
from autopar.cost.hardware import Hardware
from autopar.cost.price import BACKWARD, FORWARD
from autopar.cost.program import Links, converted, ring_seconds, sent_inside, work_dtype
from autopar.cost.shares import Sizes, check_priced, local_shapes, mesh_sizes
from autopar.cost.symbols import product
from autopar.cost.zero import Stage
from autopar.ir import ops
from autopar.ir.mesh import TIME, Mesh
from autopar.ir.program import Program, tensor_args

Part = tuple[float, float, float]  # seconds of F, I and W


@dataclass(frozen=True)
class Piece:
    """Nodes of the outer graph that stay together: a call of a block with what reads its results, or a run of ops."""

    name: str
    nodes: tuple[fx.Node, ...]


def pieces(program: Program) -> tuple[Piece, ...]:
    """The outer graph as a chain: one piece for each call of a block, one for what stands before, one for what follows.

    Ops between two calls belong to the later one. What stands before or behind all calls joins the nearest one if it
    reads no parameter. A program that calls no block is one piece.
    """
    runs: list[list[fx.Node]] = [[]]
    called = False
    for node in program.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        if called and not (op_name(node) == "getitem" and node.args[0] in runs[-1]):
            runs.append([])
            called = False
        if node.op == "call_module":
            if len(runs) == 1 and _reads_parameters(program, runs[-1]):
                runs.append([])
            called = True
        runs[-1].append(node)
    if len(runs) > 1 and not called and not _reads_parameters(program, runs[-1]):
        runs[-2:] = [[*runs[-2], *runs[-1]]]
    return tuple(Piece(_name(program, run), tuple(run)) for run in runs if run)


def units(
    program: Program, hardware: Hardware, chain: Sequence[Piece] | None = None, zero: Stage | None = None
) -> tuple[Unit, ...]:
    """Seconds and bytes of each piece of ``chain`` (``pieces`` where None), for one microbatch of one rank.

    Args:
        program: Form RESHARDED; any earlier Form on a mesh of one rank. Of a program split in microbatches, its main
            part.
        zero: the engine over the data axes, which shares states out; stage 0 where None.

    A parameter that several pieces read counts in each; a value that several keep, in the first. Collectives are not
    hidden. Raises AutoparError ``unpriced-form``, ``missing-layout``, ``no-peak``.
    """
    tally = _Tally(program, hardware)
    kept = memory.activations_by_node(program, tally.shapes)
    out = []
    for piece in pieces(program) if chain is None else chain:
        forward, backward, weight = _sum(tally.of(n) for n in piece.nodes)
        parameters, states = _states(program, _held(program, piece, tally.outer), tally.shapes, zero or Stage())
        held = float(sum(kept[n] for n in piece.nodes))
        out.append(Unit(piece.name, forward, backward, weight, parameters, states, held))
    return tuple(out)


def send_seconds(count: float, hardware: Hardware, mesh: Mesh) -> float:
    """Seconds of a message of ``count`` bytes between neighbours on ``pp``; over the network if that leaves a node."""
    return float(links.send_seconds(hardware, count, communication.link_of(hardware, mesh, "pp").nodes > 1))


class _Tally:
    """Seconds of the nodes of a program; those of a block are added up once."""

    def __init__(self, program: Program, hardware: Hardware) -> None:
        self.program, self.hardware = program, hardware
        check_priced(program)
        self.sizes: Sizes = {**mesh_sizes(program.mesh), TIME: program.mesh.microbatches}
        self.links: Mapping[str, Link] = Links(program, hardware)
        self.shapes: Shapes = local_shapes(self.sizes)
        self.blocks = {name: self._graph(block.graph) for name, block in program.blocks.items()}
        self.outer = _fixed(program.graph)

    def of(self, node: fx.Node) -> Part:
        """Seconds of a node of the outer graph."""
        return self.blocks[str(node.target)] if node.op == "call_module" else self._node(node, self.outer)

    def _graph(self, graph: fx.Graph) -> Part:
        fixed = _fixed(graph)
        return _sum(self._node(node, fixed) for node in graph.nodes)

    def _node(self, node: fx.Node, fixed: set[fx.Node]) -> Part:
        if node.op != "call_function":
            return 0.0, 0.0, 0.0
        if node.target is ops.convert:
            forward, backward = self._conversion(node)
            return (forward, 0.0, backward) if node in fixed else (forward, backward, 0.0)
        cost = node_cost(node, self.shapes)
        forward, backward = map(float, compute.seconds(cost, self.hardware, work_dtype(node)))
        weight = backward * _weight_share(node, cost, fixed)
        sent = {FORWARD: 0.0, BACKWARD: 0.0}
        for axis, _, collective, when, whole in sent_inside(node, self.shapes, self.sizes):
            ways = self.sizes[axis]
            sent[when] += float(communication.collective_seconds(collective, whole, ways, self.links[axis]))
        for when, summed in zip((FORWARD, BACKWARD), ring_seconds(node, self.shapes, self.sizes, self.hardware)):
            sent[when] += float(summed)
        return forward + sent[FORWARD], backward - weight + sent[BACKWARD], weight

    def _conversion(self, node: fx.Node) -> tuple[float, float]:
        """Seconds of a conversion's collectives and copies, forward and backward."""
        args, value = compute.bound(node), converted(node, self.sizes)
        axis = args["axis"]
        if axis == TIME:
            return 0.0, 0.0
        ways, spent = self.sizes[axis], {FORWARD: 0.0, BACKWARD: 0.0}
        for when, step in zip(spent, communication.collectives(args["src"], args["dst"])):
            if when == FORWARD or differentiable(node):
                spent[when] += float(communication.collective_seconds(step, value.bytes, ways, self.links[axis]))
        for when, copy in copies.of_node(node, value, ways):
            spent[when] += float(copies.seconds(copy, ways, self.hardware))
        return spent[FORWARD], spent[BACKWARD]


def _sum(parts: Iterable[Part]) -> Part:
    forward, backward, weight = 0.0, 0.0, 0.0
    for f, i, w in parts:
        forward, backward, weight = forward + f, backward + i, weight + w
    return forward, backward, weight


def _fixed(graph: fx.Graph) -> set[fx.Node]:
    """Parameters, buffers, and what depends on no input."""
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = (n for n in node.all_input_nodes if "handle" not in n.meta)
        made = node.op == "call_function" and fixed.issuperset(inputs)
        if made or (node.op == "placeholder" and "param" in node.meta):
            fixed.add(node)
    return fixed


def _weight_share(node: fx.Node, cost: NodeCost, fixed: set[fx.Node]) -> float:
    """The part of an op's backward that makes gradients of parameters, or of what depends on nothing else."""
    carriers = [n for n in tensor_args(node) if differentiable(n)]
    if not carriers or fixed.issuperset(carriers):
        return 1.0 if carriers else 0.0
    if cost.kind != "matmul":
        return 0.0
    factors = [n for n in compute.factors(node) if differentiable(n)]
    return sum(n in fixed for n in factors) / len(factors)


def _held(program: Program, piece: Piece, fixed: set[fx.Node]) -> dict[str, fx.Node]:
    """The parameters and buffers that a piece reads, by name, also through what is made of them alone."""
    found: dict[str, fx.Node] = {}
    todo, seen = list(piece.nodes), set(piece.nodes)
    for call in (n for n in piece.nodes if n.op == "call_module"):
        found.update((name, head) for head, name in program.own(call))
    while todo:
        for source in todo.pop().all_input_nodes:
            if "param" in source.meta:
                found[str(source.meta["param"])] = source
            elif source in fixed and source not in seen:
                seen.add(source)
                todo.append(source)
    return found


def _states(program: Program, read: dict[str, fx.Node], shapes: Shapes, zero: Stage) -> tuple[float, float]:
    """Bytes of what is read, parameters alone, and all with gradients and optimizer (AdamW, in their dtype)."""
    ways = product(program.mesh.size(a) for a in program.mesh.data_axes)
    parameters, fixed, trained = 0.0, 0.0, memory.States()
    for name, node in read.items():
        param, value = program.params[name], shapes(node)[0]
        assert value is not None
        if param.kind == "parameter" and param.trainable and param.spec.is_float:
            trained = trained + memory.states(value.numel, memory.adamw(value.dtype))
        else:
            fixed += float(value.bytes)
        parameters += float(value.bytes) if param.kind == "parameter" else 0.0
    return parameters, fixed + float(zero.held(trained, ways).total)


def _reads_parameters(program: Program, nodes: Iterable[fx.Node]) -> bool:
    return any(program.params[name].kind == "parameter" for node in nodes for name in program.reads(node))


def _name(program: Program, nodes: Sequence[fx.Node]) -> str:
    """The path of the call, else the module of the first op that reads a parameter, else of the first op."""
    for node in nodes:
        if node.op == "call_module":
            return str(node.meta["path"])
    named = [n for n in nodes if _reads_parameters(program, [n])] or list(nodes)
    return str(named[0].meta.get("module") or named[0].name)
