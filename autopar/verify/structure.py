"""Graphs are well formed, every value has its metadata, and only ops of the Form occur."""

from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.program import Form, Program


def check_structure(program: Program, after: str = "") -> None:
    """Raises AutoparError ``bad-graph``, ``no-metadata`` or ``wrong-form``."""
    for name, graph in program.graphs():
        try:
            graph.lint()
        except Exception as error:
            raise fault("bad-graph", graph, next(iter(graph.nodes)), str(error), name, after) from error
        for node in graph.nodes:
            _check_node(program, graph, node, name, after)
    for call in program.calls():
        taken = program.blocks[str(call.target)].taken()
        if len(taken) != len(call.args):
            why = f"{len(call.args)} arguments for the {len(taken)} of block {call.target}"
            raise fault("bad-graph", program.graph, call, why, "", after)
    if unknown := [name for _, name in program.held() if name not in program.params]:
        why = f"{unknown[0]} is read, but the table of parameters has no such name"
        raise fault("bad-graph", program.graph, next(iter(program.graph.nodes)), why, "", after)


def _check_node(program: Program, graph: fx.Graph, node: fx.Node, name: str, after: str) -> None:
    if node.op in ("get_attr", "call_method"):
        raise fault("bad-graph", graph, node, f"op {node.op} is not allowed", name, after)
    if node.op == "output" or "handle" in node.meta:
        return
    if "spec" not in node.meta:
        raise fault("no-metadata", graph, node, "the node has no spec", name, after)
    if program.form >= Form.ANNOTATED and "layout" not in node.meta:
        raise fault("no-metadata", graph, node, "the node has no layout", name, after)
    if node.target is ops.convert and program.form != Form.RESHARDED:
        raise fault("wrong-form", graph, node, f"a conversion in form {program.form.name}", name, after)


def fault(slug: str, graph: fx.Graph, node: fx.Node, why: str, block: str, after: str) -> AutoparError:
    """An error that shows the lines around the node."""
    return AutoparError(slug, around(graph, node, why, block, after), "this is a fault of a pass, please report it")


def around(graph: fx.Graph, node: fx.Node, why: str, block: str, after: str) -> str:
    """Where, why, and the lines around the node."""
    nodes = list(graph.nodes)
    at = nodes.index(node)
    lines = [f"{'->' if n is node else '  '} {_line(n)}" for n in nodes[max(0, at - 5) : at + 5]]
    where = f"{block or 'program'}, {node.meta.get('module') or node.name}" + (f", after pass {after}" if after else "")
    return f"{where}: {why}\n" + "\n".join(lines)


def _line(node: fx.Node) -> str:
    layout = node.meta.get("layout")
    kinds = (
        ""
        if layout is None
        else f"  {layout}"
        if isinstance(layout, tuple)
        else f"  { {a: str(t) for a, t in layout.types} }"
    )
    return (node.format_node() or node.name)[:160] + kinds
