"""Which values a gradient may flow through."""

from collections.abc import Mapping

import torch
from torch import fx

from autopar.ir.program import Param


def mark_differentiable(graph: fx.Graph, params: Mapping[str, Param]) -> None:
    """``meta["diff"]``: whether a gradient may flow through each value."""
    for node in graph.nodes:
        spec = node.meta.get("spec")
        if node.op == "placeholder":
            if "diff" not in node.meta:
                kind = params[node.meta["param"]].kind if "param" in node.meta else "input"
                node.meta["diff"] = kind in ("parameter", "input") and spec.is_float
        elif node.op == "call_function":
            floats = any(s is not None and s.is_float for s in (spec if isinstance(spec, tuple) else (spec,)))
            flows = node.target is not torch.ops.aten.detach.default and any(
                n.meta["diff"] for n in node.all_input_nodes
            )
            node.meta["diff"] = floats and flows
