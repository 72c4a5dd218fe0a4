"""Microbatches: an axis ``mb`` of the batch that is executed in time.

A step over m microbatches runs the program m times on a part of the rank's rows; the loss, a P over ``mb``,
accumulates,
and so do gradients. What couples the rows of several microbatches must be known before: a token count that divides the
loss is hoisted into a prologue, which runs once on all rows.
"""

from dataclasses import dataclass, replace
from itertools import count

from torch import fx

from autopar.ir import ops
from autopar.ir.layout import P, Shard, Type
from autopar.ir.mesh import TIME
from autopar.ir.program import Input, Output, Program, Spec
from autopar.passes.base import Context
from autopar.passes.data_parallel import DataParallel, batch_dim, check_microbatches, coupled, start
from autopar.solve.candidates import relations_of, spread
from autopar.solve.flow import Flow, Read, flow_of, readers
from autopar.solve.problem import Solution, conversions, solve
from autopar.solve.sources import batch_shard, sources
from autopar.trace.gradients import mark_differentiable


@dataclass(frozen=True)
class Microbatched:
    """A step in microbatches: ``prologue`` gives the values of ``main``'s last inputs, from the rank's whole rows."""

    prologue: Program | None
    main: Program


def microbatch(program: Program, count: int, context: Context) -> Microbatched:
    """Split a TRACED step into what runs once and what runs for each of ``count`` microbatches.

    Raises AutoparError ``batch-coupled-loss`` where rows of different microbatches meet in something that depends on
    parameters (batch statistics, an auxiliary loss over all rows), and ``microbatch-rows`` where rows do not divide.
    """
    program = replace(program, mesh=replace(program.mesh, microbatches=count))
    check_microbatches(program)
    known = _coupled(program.clone(), context)
    if not known:
        return Microbatched(None, program)
    return Microbatched(_prologue(program.clone(), known), _main(program.clone(), known))


@dataclass(frozen=True)
class _Known:
    """A value that microbatches must know whole.

    Args:
        place: its position in the outer graph.
        reads: (position, port) of those that read it whole; others go on reading a microbatch's part.
    """

    place: int
    reads: tuple[tuple[int, int], ...]


def _coupled(program: Program, context: Context) -> list[_Known]:
    """The values of the outer graph that microbatches must know whole."""
    start(program)
    flow = flow_of(program)
    relations = relations_of(flow)
    shard = batch_shard(program.mesh, TIME, program.rows)
    dims = {v: batch_dim(program, flow, v) for v in sources(flow)}
    found = spread(flow, relations, [(v, replace(shard, dim=d)) for v, d in dims.items() if d is not None])
    solution = solve(flow, DataParallel().choices(program, context, flow, found, TIME, shard))
    values = {v for v, src, dst in conversions(flow, solution) if isinstance(src, Shard) or src == P}
    return sorted((_known(program, flow, solution, v) for v in values), key=lambda k: k.place)


def _known(program: Program, flow: Flow, solution: Solution, value: int) -> _Known:
    place, nodes = _place(program, flow, value), {n: i for i, n in enumerate(program.graph.nodes)}

    def wanted(read: Read) -> Type:
        if read.kind == "op":
            return solution.assignments[read.node].inputs[read.port]
        if read.kind == "output":
            return solution.outputs[read.port]
        return solution.types[flow.at[program.blocks[str(read.node.target)].taken()[read.port], 0]]

    reads = readers(program.graph, "")[flow.values[value].key]
    return _Known(place, tuple((nodes[r.node], r.port) for r in reads if wanted(r) != solution.types[value]))


def _place(program: Program, flow: Flow, value: int) -> int:
    """Position in the outer graph of a value that depends on inputs alone; else refused."""
    node = flow.values[value].key[0]
    nodes = list(program.graph.nodes)
    at = next(
        (i for i, n in enumerate(nodes) if (n is node or n.args[:1] == (node,)) and _stands_for(flow, n, value)), None
    )
    if at is None or _reads_parameters(nodes[at]):
        raise coupled(flow, value)
    return at


def _stands_for(flow: Flow, node: fx.Node, value: int) -> bool:
    try:
        return flow.of(node) == value and not isinstance(node.meta.get("spec"), tuple)
    except KeyError:
        return False


def _reads_parameters(node: fx.Node) -> bool:
    seen, todo = {node}, [node]
    while todo:
        n = todo.pop()
        if ("param" in n.meta and n.meta.get("diff")) or n.op == "call_module" or ops.drawn(n):
            return True
        fresh = [a for a in n.all_input_nodes if a not in seen]
        seen.update(fresh)
        todo += fresh
    return False


def _prologue(program: Program, known: list[_Known]) -> Program:
    nodes = list(program.graph.nodes)
    out = nodes[-1]
    out.args = (tuple(nodes[k.place] for k in known),)
    program.outputs = tuple(Output("user", f"hoisted.{i}") for i in range(len(known)))
    program.mesh = replace(program.mesh, microbatches=1)
    return _swept(program)


def _main(program: Program, known: list[_Known]) -> Program:
    nodes = list(program.graph.nodes)
    heads = [n for n in nodes if n.op == "placeholder"]
    for i, k in enumerate(known):
        with program.graph.inserting_after(heads[-1]):
            new = program.graph.placeholder(f"hoisted_{i}")
        new.meta = {"spec": nodes[k.place].meta["spec"], "diff": False, "input": len(program.inputs), "module": ""}
        heads.append(new)
        for at, port in k.reads:
            _rewire(nodes[at], port, new)
        program.inputs = (*program.inputs, Input(f"hoisted.{i}", new.meta["spec"], None))
    mark_differentiable(program.graph, program.params)
    return _swept(program)


def _rewire(node: fx.Node, port: int, new: fx.Node) -> None:
    """``node`` reads ``new`` at its ``port``, in the order of ``tensor_args``."""
    ports = count()

    def taken(a: fx.Node) -> fx.Node:
        return new if isinstance(a.meta.get("spec"), Spec) and next(ports) == port else a

    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), taken)


def _swept(program: Program) -> Program:
    """Without the nodes and blocks that nothing needs."""
    for node in reversed(list(program.graph.nodes)):
        if not node.users and node.op not in ("output", "placeholder"):
            program.graph.erase_node(node)
    used = {str(call.target) for call in program.calls()}
    return replace(program, blocks={n: b for n, b in program.blocks.items() if n in used})
