"""Microbatches: an axis ``mb`` of the batch that is executed in time.

A step over m microbatches runs the program m times on a part of the rank's rows; the loss, a P over ``mb``,
accumulates,
and so do gradients. What couples the rows of several microbatches must be known before: a token count that divides the
loss is hoisted into a prologue, which runs once on all rows.
"""

from dataclasses import dataclass, replace

from torch import fx

from autopar.ir import ops
from autopar.ir.layout import P, Shard
from autopar.ir.mesh import TIME
from autopar.ir.program import Input, Output, Program
from autopar.passes.base import Context
from autopar.passes.data_parallel import DataParallel, batch_dim, check_microbatches, coupled, start
from autopar.solve.candidates import relations_of, spread
from autopar.solve.flow import Flow, flow_of
from autopar.solve.problem import conversions, solve
from autopar.solve.sources import batch_shard, sources


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
    places = _coupled(program.clone(), context)
    if not places:
        return Microbatched(None, program)
    return Microbatched(_prologue(program.clone(), places), _main(program.clone(), places))


def _coupled(program: Program, context: Context) -> list[int]:
    """Places in the outer graph of the values that microbatches must know whole."""
    start(program)
    flow = flow_of(program)
    relations = relations_of(flow)
    shard = batch_shard(program.mesh, TIME, program.rows)
    dims = {v: batch_dim(program, flow, v) for v in sources(flow)}
    found = spread(flow, relations, [(v, replace(shard, dim=d)) for v, d in dims.items() if d is not None])
    solution = solve(flow, DataParallel().choices(program, context, flow, found, TIME, shard))
    values = {v for v, src, dst in conversions(flow, solution) if isinstance(src, Shard) or src == P}
    return sorted(_place(program, flow, v) for v in values)


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


def _prologue(program: Program, places: list[int]) -> Program:
    nodes = list(program.graph.nodes)
    out = nodes[-1]
    out.args = (tuple(nodes[p] for p in places),)
    program.outputs = tuple(Output("user", f"hoisted.{i}") for i in range(len(places)))
    program.mesh = replace(program.mesh, microbatches=1)
    return _swept(program)


def _main(program: Program, places: list[int]) -> Program:
    nodes = list(program.graph.nodes)
    heads = [n for n in nodes if n.op == "placeholder"]
    for i, p in enumerate(places):
        with program.graph.inserting_after(heads[-1]):
            new = program.graph.placeholder(f"hoisted_{i}")
        new.meta = {"spec": nodes[p].meta["spec"], "diff": False, "input": len(program.inputs), "module": ""}
        heads.append(new)
        nodes[p].replace_all_uses_with(new)
        program.inputs = (*program.inputs, Input(f"hoisted.{i}", new.meta["spec"], None))
    return _swept(program)


def _swept(program: Program) -> Program:
    """Without the nodes and blocks that nothing needs."""
    for node in reversed(list(program.graph.nodes)):
        if not node.users and node.op not in ("output", "placeholder"):
            program.graph.erase_node(node)
    used = {str(call.target) for call in program.calls()}
    return replace(program, blocks={n: b for n, b in program.blocks.items() if n in used})
