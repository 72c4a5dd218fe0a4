"""Every layout follows from the rules: the same rules that the solver chose from, applied to what the program says."""

from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import cast

from torch import fx

from autopar.ir import ops
from autopar.ir.layout import I, Layout, P, R, Shard, Type, overlap
from autopar.ir.mesh import TIME
from autopar.ir.program import Form, Program, tensor_args
from autopar.rules.strategies import canonical, legal
from autopar.solve.annotate import layout_of, layouts
from autopar.solve.flow import block_outputs, is_op, placeholders
from autopar.solve.sources import batch_shard
from autopar.verify.structure import fault


def check_layouts(program: Program, after: str = "") -> None:
    """Recompute each node's types on each axis.

    Raises AutoparError ``layout-mismatch`` where a reader gets another layout than it is computed for, an op cannot
    make its output from its inputs (a partial value that meets a nonlinear op, a missing or doubled conversion), or two
    axes share out the same elements; ``input-layout`` and ``param-layout`` where the program takes an input or a
    parameter in another way than its caller holds it, and ``output-layout`` where it returns something that is not what
    its caller expects.
    """
    axes = annotated(program)
    sound: set[int] = set()  # ids of layouts that share out no element twice
    for name, graph in program.graphs():
        for node in graph.nodes:
            _check_digits(graph, node, name, after, sound)
            if is_op(node):
                _check_op(axes, graph, node, name, after)
            elif node.op == "call_module" and program.form == Form.RESHARDED:
                _check_call(program, node, after)
    _check_inputs(program, after)
    check_params(program, after)
    _check_outputs(program, after)


def _check_op(axes: list[str], graph: fx.Graph, node: fx.Node, name: str, after: str) -> None:
    wanted = node.meta.get("requires") or tuple(layout_of(a) for a in tensor_args(node))
    if node.target is ops.convert:
        x, axis, src, dst = cast(tuple[fx.Node, str, Type, Type], node.args)
        have = layout_of(x)
        if not equal(have.get(axis), src, x) or have.having(axis, dst) != have.having(axis, layouts(node)[0].get(axis)):
            why = f"converts from {src}, but its input is {have.get(axis)}"
            raise fault("layout-mismatch", graph, node, why, name, after)
        if any(layouts(node)[0].get(a) != t for a, t in have.types if a != axis):
            raise fault("layout-mismatch", graph, node, "changes another axis too", name, after)
        return
    for axis in axes:
        inputs = [w.get(axis) for w in wanted]
        outputs = [lay.get(axis) for lay in layouts(node)]
        if not legal(node, inputs, outputs):
            types = f"({', '.join(map(str, inputs))}) -> ({', '.join(map(str, outputs))})"
            raise fault("layout-mismatch", graph, node, f"on {axis}, {node.target} cannot take {types}", name, after)


def _check_digits(graph: fx.Graph, node: fx.Node, name: str, after: str, sound: set[int]) -> None:
    for layout in layouts(node) if "layout" in node.meta else ():
        if id(layout) in sound:
            continue
        if why := _shared_digit(layout):
            raise fault("layout-mismatch", graph, node, why, name, after)
        sound.add(id(layout))


@lru_cache(maxsize=4096)
def _shared_digit(layout: Layout) -> str:
    """Which two axes share out the same elements; empty where none do."""
    for (a, one), (b, other) in combinations(layout.shards(), 2):
        if overlap(one, other):
            return f"{a} ({one}) and {b} ({other}) share out the same elements of a dim"
    return ""


def equal(have: Type, want: Type, node: fx.Node) -> bool:
    """Whether a value of type ``have`` serves a reader of ``want``: R and I are one where no gradient flows."""
    diff = bool(node.meta.get("diff"))
    return canonical(have, diff) == canonical(want, diff)


def annotated(program: Program) -> list[str]:
    """Axes that some pass has typed."""
    kinds: dict[int, Layout] = {}
    for _, graph in program.graphs():
        for node in graph.nodes:
            if "layout" in node.meta:
                kinds.update((id(layout), layout) for layout in layouts(node))
    return list(dict.fromkeys(a for layout in kinds.values() for a, _ in layout.types))


def _check_call(program: Program, node: fx.Node, after: str) -> None:
    block = program.blocks[str(node.target)]
    for want, arg in program.given(node):
        _same(program.graph, node, layout_of(arg), layout_of(want), arg, after)
    for made, inner in zip(layouts(node), block_outputs(block.graph), strict=True):
        _same(program.graph, node, made, layout_of(inner), inner, after)


def _same(graph: fx.Graph, node: fx.Node, have: Layout, want: Layout, value: fx.Node, after: str) -> None:
    if have == want:
        return
    for axis, kind in want.types:
        if not equal(have.get(axis), kind, value):
            raise fault(
                "layout-mismatch",
                graph,
                node,
                f"{value} is {have.get(axis)} on {axis}, its reader wants {kind}",
                "",
                after,
            )


def rows_of(program: Program, axis: str, batch_dim: int | None) -> Type:
    """What the caller holds on ``axis`` of a tensor with this batch dim: its rows where the axis carries data."""
    if batch_dim is None or not program.mesh.is_data(axis) or program.mesh.size(axis) == 1:
        return I
    return replace(batch_shard(program.mesh, axis, program.rows), dim=batch_dim)


def _check_inputs(program: Program, after: str) -> None:
    for node in placeholders(program.graph):
        if "input" in node.meta:
            entry = program.inputs[node.meta["input"]]
            for axis, kind in layout_of(node).types:
                in_time = axis == TIME and entry.batch_dim is None
                want = R if in_time else rows_of(program, axis, entry.batch_dim)
                if not equal(kind, want, node):
                    why = f"input {entry.name} is {kind} on {axis}, its caller holds {want}"
                    raise fault("input-layout", program.graph, node, why, "", after)


def _check_outputs(program: Program, after: str) -> None:
    if program.form != Form.RESHARDED:
        return
    out = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    for entry, arg in zip(program.outputs, out.args[0], strict=True):
        if not isinstance(arg, fx.Node):
            continue
        for axis, kind in layout_of(arg).types:
            summed = program.mesh.is_summed(axis)
            want = P if entry.kind == "loss" and summed else rows_of(program, axis, entry.batch_dim)
            if not equal(kind, want, arg):
                why = f"output {entry.name} is {kind} on {axis}, not {want}"
                raise fault("output-layout", program.graph, out, why, "", after)


def check_params(program: Program, after: str = "") -> None:
    """Where the engine sums gradients a trainable parameter is R, elsewhere I; or sharded. The rest is I, or sharded.

    Raises AutoparError ``param-layout``, also where the graph takes a parameter otherwise than the table says.
    """
    fine: dict[fx.Node, Layout | None] = {}  # of layers that are alike one is looked at
    for node, name in program.held():
        param = program.params[name]
        if node in fine and fine[node] is param.layout:
            continue
        held = param.layout or Layout()
        for axis, kind in layout_of(node).types:
            want = R if program.mesh.is_summed(axis) else I
            may = isinstance(kind, Shard) or equal(kind, want, node)
            if not may or not equal(kind, held.get(axis), node):
                why = f"{param.name} is {kind} on {axis}, held as {held.get(axis)}; whole it would be {want}"
                raise fault("param-layout", program.graph, node, why, "", after)
        fine[node] = param.layout
