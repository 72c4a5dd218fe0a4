"""On a context axis no op makes scores of all queries against all keys; masks and biases of attention are no scores."""

from collections.abc import Iterator
from itertools import combinations

from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import Shard, plain_shard
from autopar.ir.program import Form, Program
from autopar.rules.arguments import arguments, shape_of
from autopar.rules.builders import pointwise
from autopar.rules.local import WRITTEN
from autopar.rules.relation import Relation
from autopar.rules.table import relation
from autopar.solve.annotate import layouts
from autopar.solve.candidates import Candidates, spread
from autopar.solve.flow import Flow, flow_of
from autopar.verify.structure import around, fault

FIX = "write it with scaled_dot_product_attention where it is attention, or use tp or dp for these ranks"


def check_context(program: Program, after: str = "") -> None:
    """Every attention is shared out over ``cp``, and nothing else computes from queries times keys.

    The dims of positions are found anew, by carrying those of every attention (without one: the shards on ``cp``)
    through the rules. Scores are what an op makes with the positions of two activations as dims of their own, and what
    follows from that element by element. They may only be added to those of an attention, as a bias: what else reads
    them has a tensor of queries times keys in memory. A bias or mask that is made of parameters, positions or inputs
    alone is no such thing. Once LOCAL, what no fused kernel takes is computed in tiles.

    Raises AutoparError ``whole-attention``, ``square-scores``.
    """
    ways, axes = program.mesh.size("cp"), program.mesh.parts("cp")
    if ways > 1 and program.form >= Form.LOCAL:
        _check_kernels(program, after)
    if ways == 1 or not Form.ANNOTATED <= program.form <= Form.RESHARDED or not _typed(program, axes):
        return
    for name, graph in program.graphs():
        for node in graph.nodes:
            if node.target in ops.ATTENTION:
                _check_attention(graph, node, axes, name, after)
    flow = flow_of(program)
    relations = {node: _relation(node) for node, _ in flow.ops}
    found = spread(flow, relations, _seeds(flow, ways, axes))
    scores = _scores(flow, found, _activations(flow))
    for node, _ in flow.ops:
        for v in flow.inputs(node) if node.target not in ops.ATTENTION else ():
            if v in scores and not any(out in scores for out in flow.outputs(node)):
                raise _made(scores[v], flow, v, found, after)


def _typed(program: Program, axes: tuple[str, ...]) -> bool:
    """Whether the pass for ``cp`` has run."""
    known = (a for n in program.graph.nodes if "layout" in n.meta for lay in layouts(n) for a, _ in lay.types)
    return any(a in axes for a in known)


def _check_attention(graph: fx.Graph, node: fx.Node, axes: tuple[str, ...], name: str, after: str) -> None:
    """A rank computes its queries' or its heads' part."""
    for axis, kind in layouts(node)[0].types:
        if axis in axes and not isinstance(kind, Shard):
            why = f"every rank of {axis} computes all of an attention ({kind})"
            raise AutoparError("whole-attention", around(graph, node, why, name, after), FIX)


def _check_kernels(program: Program, after: str) -> None:
    """What a fused kernel does not take is computed tile by tile: the op itself would hold every score."""
    for name, graph in program.graphs():
        for node in graph.find_nodes(op="call_function", target=ops.attention):
            known = arguments(node)
            if any(known[n] is not None for n in (*WRITTEN, "band", "query_ids")):
                raise fault("square-scores", graph, node, "queries times keys inside of an attention", name, after)


def _relation(node: fx.Node) -> Relation:
    return pointwise()(node) if node.target is ops.convert else relation(node)


def _seeds(flow: Flow, ways: int, axes: tuple[str, ...]) -> Iterator[tuple[int, Shard]]:
    """Positions of queries, keys and results of attention; without attention, what is sharded on cp."""
    nodes = [node for node, _ in flow.ops if node.target in ops.ATTENTION]
    for node in nodes:
        known = arguments(node)
        for x in (known["q"], known["k"], known["v"], node):
            shape = shape_of(x)
            shard = plain_shard(len(shape) - 2, shape[-2], ways)
            if shard is not None:
                yield flow.of(x), shard
    for (node, index), v in flow.at.items() if not nodes else ():
        kinds = layouts(node)[index].types if "layout" in node.meta else ()
        yield from ((v, kind) for axis, kind in kinds if axis in axes and isinstance(kind, Shard))


def _activations(flow: Flow) -> set[int]:
    """Values that depend on a parameter and on an input."""
    depends: dict[int, set[str]] = {}
    for v, value in enumerate(flow.values):
        if value.role == "input":
            depends[v] = {"input"}
        elif value.role == "param" and flow.program.params[value.param].kind == "parameter":
            depends[v] = {"parameter"}
    bound = [(a, group.value) for group in flow.groups for a in group.arguments]
    made = [(v, flow.inputs(node)) for node, _ in flow.ops for v in flow.outputs(node) if v is not None]
    before = -1
    while before != (before := sum(map(len, depends.values()))):
        for v, sources in [*((a, [b]) for a, b in bound), *made]:
            new = set().union(*(depends.get(s, ()) for s in sources))
            if new:
                depends.setdefault(v, set()).update(new)
    return {v for v, of in depends.items() if len(of) == 2}


def _scores(flow: Flow, found: Candidates, activations: set[int]) -> dict[int, fx.Node]:
    """Values that are scores, each with the op that joined queries and keys."""
    scores: dict[int, fx.Node] = {}
    bound = [(a, group.value) for group in flow.groups for a in group.arguments]
    before = -1
    while before != (before := len(scores)):
        scores.update({a: scores[v] for a, v in bound if v in scores})
        for node, _ in flow.ops:
            inputs = flow.inputs(node)
            first = next((scores[v] for v in inputs if v in scores), None)
            for port, v in enumerate(flow.outputs(node), len(inputs)):
                if v is None or v in scores or not _square(found, v):
                    continue
                if first is not None:
                    scores[v] = first
                elif _joins(node, port, list(found.shards[v]), found.relations[node], inputs, activations):
                    scores[v] = node
    return scores


def _square(found: Candidates, v: int) -> bool:
    """Whether two dims are positions."""
    return len({shard.dim for shard in found.shards.get(v, ())}) > 1


def _joins(
    node: fx.Node, port: int, shards: list[Shard], rule: Relation, inputs: list[int], activations: set[int]
) -> bool:
    """Whether two dims of an output come from two activations, neither of which has both."""
    carried: list[tuple[int, set[int]]] = []
    for shard in shards:
        found = rule.transfer(port, shard)
        if found is not None:
            kinds = zip(inputs, found.inputs, strict=True)
            carried.append((shard.dim, {v for v, kind in kinds if isinstance(kind, Shard) and v in activations}))
    pairs = combinations(carried, 2)
    return any(a != b and one - other and other - one for (a, one), (b, other) in pairs)


def _made(node: fx.Node, flow: Flow, v: int, found: Candidates, after: str) -> AutoparError:
    shape, dims = list(flow.values[v].spec.shape), sorted({shard.dim for shard in found.shards[v]})
    name = next((n for n, graph in flow.program.graphs() if graph is node.graph), "")
    source = f" ({node.meta['source']})" if node.meta.get("source") else ""
    why = f"queries times keys, {shape} (dims {dims}), of an attention that is not recognized{source}"
    return AutoparError("square-scores", around(node.graph, node, why, name, after), FIX)
