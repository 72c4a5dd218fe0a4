"""Bytes that each unit keeps from its forward to its backward, under each policy of recomputation."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.cost.compute import ATTENTIONS, Shapes, bound, differentiable, node_cost
from autopar.cost.kernels import fusion, kept
from autopar.cost.memory import moves_nothing, owner_of, saved, storage
from autopar.cost.symbols import Number
from autopar.cost.transient import transient
from autopar.ir import ops
from autopar.ir.layout import Shard
from autopar.ir.program import Program, tensor_args

FIRST, LAST = "first", "last"  # what stands before the blocks, and behind them
HEAVY = ("matmul", "attention")
TRANSIENT = {"transient": True, "alone": False}


def keeps(
    program: Program, shapes: Shapes, sides: Mapping[fx.Node, str], fused: bool = False, regather: bool = False
) -> dict[str, dict[str, Number]]:
    """By unit: bytes of one call under "none", "selective" and "full" recompute, and "hidden", what it passes on.

    Also "again": what selective recomputation makes again; "sent": what it keeps of collectives' results; "scores":
    what attention keeps besides its inputs and result; "transient" and, on one tensor rank, "alone": see
    ``cost.transient``, 0 where fused.

    Args:
        sides: "first" or "last" of each node of the outer graph, which never recomputes.
        fused: whether pointwise chains are one kernel. regather: whether gathered activations are gathered again.
    """
    everything = _everything(program, shapes, sides, fused, regather)
    out: dict[str, dict[str, Number]] = {}
    for unit in (FIRST, *program.blocks, LAST):
        own = everything.get(unit, 0)
        block = program.blocks.get(unit)
        nodes = [n for n, side in sides.items() if side == unit] if block is None else list(block.graph.nodes)
        moments = {name: 0 if fused else transient(nodes, shapes, several) for name, several in TRANSIENT.items()}
        scores = sum(saved(n, shapes).extra for n in nodes if n.target in ATTENTIONS)
        out[unit] = {"none": own, "selective": own, "full": own, "scores": scores, **moments}
        out[unit] |= {"hidden": 0, "again": 0, "sent": 0}
    for name, block in program.blocks.items():
        results: Any = block.graph.output_node().args[0]
        passed = sum(_bytes(n, shapes) for n in results if isinstance(n, fx.Node) and differentiable(n))
        heavy = sum(_bytes(n, shapes) + saved(n, shapes).extra for n in block.graph.nodes if _heavy(n))
        again = {s for n in block.graph.nodes for v in saved(n, shapes).values if not _heavy(s := storage(v))}
        light = sum(_bytes(n, shapes) for n in again if n.op == "call_function")
        sent = sum(_bytes(n, shapes) for n in block.graph.nodes if n.target is ops.convert and _heavy(n))
        out[name].update(selective=heavy + passed, full=passed, hidden=passed, again=light, sent=sent)
    calls = list(program.calls())
    if calls:
        entering = (n for n in calls[0].all_input_nodes if "param" not in n.meta and differentiable(n))
        out[sides[program_first(program)]]["hidden"] = sum(_bytes(n, shapes) for n in entering)
    return out


def gathers(node: fx.Node) -> bool:
    """Whether the node makes a whole value of shards."""
    if node.target is not ops.convert:
        return False
    args = bound(node)
    return isinstance(args["src"], Shard) and not isinstance(args["dst"], Shard)


def program_first(program: Program) -> fx.Node:
    """The first node of the outer graph."""
    return next(iter(program.graph.nodes))


def _everything(
    program: Program, shapes: Shapes, sides: Mapping[fx.Node, str], fused: bool, regather: bool
) -> dict[str, Number]:
    """Bytes kept of one call of each unit where nothing is recomputed; a value belongs to the unit that makes it."""
    graphs = dict(program.graphs())
    groups = {name: fusion(graph) if fused else {} for name, graph in graphs.items()}
    found = {name: {n: kept(n, shapes, groups[name]) for n in graph.nodes} for name, graph in graphs.items()}
    total: dict[str, Number] = defaultdict(int)
    values: set[tuple[fx.Node | None, fx.Node]] = set()
    for call in (None, *program.calls()):
        name = str(call.target) if call is not None else ""
        for node, what in found[name].items():
            unit = sides[node] if call is None else name
            total[unit] = total[unit] + what.extra
            held = (_shards(v) if regather else v for v in what.values)
            values.update(filter(None, (owner_of(program, call, v) for v in held)))
    count = Counter((sides[node] if call is None else str(call.target), node) for call, node in values)
    for (unit, node), times in count.items():
        total[unit] = total[unit] + times * _bytes(node, shapes)
    return {unit: bytes_ / (len(program.calls_of(unit)) or 1) for unit, bytes_ in total.items()}


def _shards(value: fx.Node) -> fx.Node:
    """What is kept of a gathered value that is gathered again: its own shard."""
    source = storage(value)
    return tensor_args(source)[0] if gathers(source) else value


def _heavy(node: fx.Node) -> bool:
    """What selective recomputation keeps: results of matrix products, attention and collectives."""
    if node.target is ops.convert:
        return differentiable(node) and not moves_nothing(node)
    return differentiable(node) and node_cost(node).kind in HEAVY


def _bytes(node: fx.Node, shapes: Shapes) -> Number:
    return sum(v.bytes for v in shapes(node) if v is not None)
