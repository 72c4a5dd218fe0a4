"""The same program without dropout, and in double precision: explicit casts and constants included."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir import ops
from autopar.ir.program import Spec
from autopar.rules.arguments import with_arguments
from autopar.trace import Traced

NARROW = (torch.float32, torch.float16, torch.bfloat16)


def quiet(traced: Traced) -> Traced:
    """The trace with every dropout off."""
    program = traced.program.clone()
    for _, graph in program.graphs():
        for node in list(graph.nodes):
            if node.target is ops.dropout:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.target is ops.attention:
                with_arguments(node, dropout=0.0)
    return replace(traced, program=program)


def widen(traced: Traced) -> Traced:
    """The trace with every float type as float64."""
    program = traced.program.clone()
    for _, graph in program.graphs():
        for node in graph.nodes:
            node.args, node.kwargs = _wide(node.args), _wide(node.kwargs)
            spec = node.meta.get("spec")
            if spec is not None:
                node.meta["spec"] = tuple(map(_wide_spec, spec)) if isinstance(spec, tuple) else _wide_spec(spec)
            _pin_default(node)
    params = {n: replace(p, spec=_wide_spec(p.spec)) for n, p in program.params.items()}
    inputs = tuple(replace(i, spec=_wide_spec(i.spec)) for i in program.inputs)
    constants = {n: t.double() if t.is_floating_point() else t for n, t in traced.constants.items()}
    return replace(traced, program=replace(program, params=params, inputs=inputs), constants=constants)


def _wide(tree: Any) -> Any:
    return fx.node.map_aggregate(tree, lambda x: torch.float64 if x in NARROW and isinstance(x, torch.dtype) else x)


def _wide_spec(spec: Any) -> Any:
    return replace(spec, dtype=torch.float64) if isinstance(spec, Spec) and spec.dtype in NARROW else spec


def _pin_default(node: fx.Node) -> None:
    """A factory without a dtype would make float32."""
    schema = getattr(node.target, "_schema", None)
    spec = node.meta.get("spec")
    if schema is None or not isinstance(spec, Spec) or spec.dtype != torch.float64 or node.all_input_nodes:
        return
    if any(a.name == "dtype" for a in schema.arguments):
        node.kwargs = {**node.kwargs, "dtype": torch.float64}
