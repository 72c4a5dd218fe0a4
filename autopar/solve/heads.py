"""Key heads for Ulysses: where fewer than ranks, each is repeated for the ranks that read it."""

from math import lcm

from torch import fx

from autopar.ir import edit
from autopar.ir.layout import Layout, Shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import tensor_args
from autopar.rules.arguments import arguments, shape_of, with_arguments
from autopar.rules.table import aten, relation
from autopar.solve.annotate import layout_of
from autopar.solve.sequence import head_ranks, heads_shard, wanted_of


def repeat_keys(graph: fx.Graph, node: fx.Node, mesh: Mesh, axis: str) -> None:
    """Give the attention ``node`` as many key heads as the ranks of ``axis``, and of what shares heads before, need.

    The copies are made before the all-to-all, so that it sends each rank the heads that it reads; their gradients are
    summed by the backward of the copy. Raises AutoparError ``ulysses-heads`` where query heads do not divide.
    """
    heads_shard(node, mesh, axis)
    known = arguments(node)
    groups = shape_of(known["k"])[-3]
    wanted = lcm(groups, head_ranks(node, mesh) * mesh.size(axis))
    if wanted == groups:
        return
    have = {n: wanted_of(node, known[n]) for n in ("k", "v")}
    first = wanted_of(node, known["q"])
    made = {n: _repeated(graph, node, known[n], have[n], wanted // groups) for n in ("k", "v")}
    rest = (
        list(node.meta["requires"][3:]) if node.meta.get("requires") else [layout_of(x) for x in tensor_args(node)[3:]]
    )
    with_arguments(node, **made, enable_gqa=shape_of(known["q"])[-3] != wanted)
    node.meta["requires"] = (first, *_keys(node, first, made), *rest)


def _repeated(graph: fx.Graph, node: fx.Node, x: fx.Node, layout: Layout, times: int) -> fx.Node:
    """[.., G, T, D] with every head ``times`` times in a row."""
    *lead, groups, length, width = shape_of(x)
    steps = (
        (aten.unsqueeze.default, (len(lead) + 1,)),
        (aten.expand.default, ([*lead, groups, times, length, width],)),
        (aten.reshape.default, ([*lead, groups * times, length, width],)),
    )
    for target, rest in steps:
        with graph.inserting_before(node):
            new = edit.call(graph, target, (x, *rest), like=node)
        new.meta["diff"], new.meta["requires"] = x.meta.get("diff"), (layout,)
        layout = Layout(tuple((a, _through(new, t)) for a, t in layout.types))
        new.meta["layout"], x = layout, new
    return x


def _through(node: fx.Node, kind):  # type: ignore[no-untyped-def]
    if not isinstance(kind, Shard):
        return kind
    made = relation(node).transfer(0, kind)
    assert made is not None
    return made.outputs[0]


def _keys(node: fx.Node, q: Layout, made: dict[str, fx.Node]) -> list[Layout]:
    """How the attention wants its new keys and values: on each axis, what goes with its queries."""
    ports = [tensor_args(node).index(x) for x in made.values()]
    out = [made[n].meta["layout"] for n in made]
    for axis, kind in q.types:
        found = relation(node).transfer(0, kind) if isinstance(kind, Shard) else None
        if found is not None:
            out = [lay.having(axis, found.inputs[p]) for lay, p in zip(out, ports)]
    return out
