"""Programs as Python, JSON and DOT."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.describe import Describer, dtype_name, op_name, row_of
from autopar.ir.layout import Layout
from autopar.ir.program import Param, Program, Spec, specs


def to_python(graphs: Mapping[str, fx.Graph]) -> str:
    """The code that fx generates for each graph, a comment with its name before it, and the path behind each call."""
    return "\n\n".join(f"# {name or 'outer graph'}\n{_code(graph)}\n" for name, graph in graphs.items())


def _code(graph: fx.Graph) -> str:
    paths = {n.name: n.meta["path"] for n in graph.nodes if n.op == "call_module" and "path" in n.meta}
    lines = graph.python_code("self").src.strip().splitlines()
    made = (line.partition(" = ")[0].strip() for line in lines)
    return "\n".join(f"{line}  # {paths[name]}" if name in paths else line for line, name in zip(lines, made))


def _layout(layout: Any) -> Any:
    if isinstance(layout, Layout):
        return {axis: str(kind) for axis, kind in layout.types}
    return [_layout(one) for one in layout] if isinstance(layout, tuple) else None


def _spec(spec: Spec) -> dict[str, Any]:
    return {"shape": list(spec.shape), "dtype": dtype_name(spec.dtype)}


def _target(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, (str, torch._ops.OpOverload)) else op_name(node)


def _node(node: fx.Node, describer: Describer) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": describer.names.get(node, node.name),
        "op": node.op,
        "target": _target(node),
        "args": [describer.value(a) for a in node.args],
        "kwargs": {k: describer.value(v) for k, v in node.kwargs.items()},
        "specs": [_spec(s) if isinstance(s, Spec) else None for s in specs(node)],
        "layout": _layout(node.meta.get("layout")),
        "flops": describer.flops(node) or None,
    }
    meta: dict[str, Any] = {
        k: node.meta[k] for k in ("module", "source", "param", "input", "handle", "path") if k in node.meta
    }
    return {k: v for k, v in {**found, **meta}.items() if v not in (None, [], {}, [None])}


def _param(param: Param) -> dict[str, Any]:
    flags = {"kind": param.kind, "trainable": param.trainable, "tied": list(param.tied)}
    return {"name": param.name, **_spec(param.spec), **flags, "layout": _layout(param.layout)}


def to_json(program: Program, graphs: Mapping[str, fx.Graph], describer: Describer) -> str:
    """One object: form, mesh, inputs, outputs, parameters, and the nodes of each graph (the outer one is "").

    A line each for an input, an output, a parameter and a node, so that two programs can be compared by line.
    """
    whole: dict[str, Any] = {
        "form": program.form.name,
        "mesh": dict(program.mesh.axes),
        "at": program.at,
        "inputs": [{"name": i.name, **_spec(i.spec), "batch_dim": i.batch_dim} for i in program.inputs],
        "outputs": [{"kind": o.kind, "name": o.name, "batch_dim": o.batch_dim} for o in program.outputs],
        "params": [_param(p) for p in program.params.values()],
        "graphs": {name: [_node(n, describer) for n in graph.nodes] for name, graph in graphs.items()},
    }
    return _lines(whole) + "\n"


def _lines(value: Any, depth: int = 0) -> str:
    """JSON with a line for each item of a list and each entry of the two outer objects."""
    inner, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict) and value and depth < 2 and not (depth and _flat(value)):
        entries = (f"{json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in value.items())
        return f"{{{inner}{(',' + inner).join(entries)}{end}}}"
    if isinstance(value, list) and value and not all(isinstance(v, (int, str)) for v in value):
        return f"[{inner}{(',' + inner).join(json.dumps(v, ensure_ascii=False) for v in value)}{end}]"
    return json.dumps(value, ensure_ascii=False)


def _flat(value: dict[str, Any]) -> bool:
    return all(isinstance(v, (int, str)) for v in value.values())


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _attributes(node: fx.Node, describer: Describer) -> str:
    row = row_of(node) if node.op == "call_function" else None
    text = row.name if row else op_name(node) if node.op == "call_function" else str(node.target)
    label = f"label={_quoted(chr(10).join(filter(None, (text, describer.type(node), describer.cost(node)))))}"
    return label + (", style=filled, fillcolor=lightblue" if row else "")


def _cluster(number: int, name: str, graph: fx.Graph, describer: Describer) -> list[str]:
    def key(node: fx.Node) -> str:
        return _quoted(f"{number}/{node.name}")

    lines = [f"  subgraph cluster_{number} {{", f"    label={_quoted(name or 'graph')};"]
    lines += [f"    {key(n)} [{_attributes(n, describer)}];" for n in graph.nodes]
    lines += [f"    {key(a)} -> {key(n)};" for n in graph.nodes for a in n.all_input_nodes]
    return [*lines, "  }"]


def to_dot(graphs: Mapping[str, fx.Graph], describer: Describer) -> str:
    """Graphviz text: a cluster for each graph, an edge for each use of a value; collectives are filled."""
    lines = ["digraph program {", "  node [shape=box, fontname=monospace];"]
    for number, (name, graph) in enumerate(graphs.items()):
        lines += _cluster(number, name, graph, describer)
    return "\n".join([*lines, "}"]) + "\n"
