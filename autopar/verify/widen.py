"""The same program without dropout, and in double precision: explicit casts and constants included."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir import ops
from autopar.ir.program import Spec
from autopar.rules.arguments import with_arguments
from autopar.trace import Traced

aten = torch.ops.aten

WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


def quiet(traced: Traced) -> Traced:
    """The trace with every dropout off, and the middle of each distribution in place of what is drawn from it."""
    program = traced.program.clone()
    for _, graph in program.graphs():
        for node in list(graph.nodes):
            if node.target is ops.dropout:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.target is ops.draw:
                node.target, node.args = (
                    aten.full_like.default,
                    (node.args[0], 0.5 if node.args[1] == "uniform" else 0.0),
                )
            elif node.target is ops.attention:
                with_arguments(node, dropout=0.0)
    return replace(traced, program=program)


@contextmanager
def wide() -> Iterator[None]:
    """While the context lasts, float64 is the dtype of what has none: sines of integers, tensors made from nothing."""
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def widen(traced: Traced) -> Traced:
    """The trace with every float type as float64; to be run in the context ``wide``."""
    program = traced.program.clone()
    for _, graph in program.graphs():
        for node in graph.nodes:
            node.args, node.kwargs = _wide(node.args), _wide(node.kwargs)
            spec = node.meta.get("spec")
            if spec is not None:
                node.meta["spec"] = tuple(map(_wide_spec, spec)) if isinstance(spec, tuple) else _wide_spec(spec)
    params = {n: replace(p, spec=_wide_spec(p.spec)) for n, p in program.params.items()}
    inputs = tuple(replace(i, spec=_wide_spec(i.spec)) for i in program.inputs)
    constants = {n: t.to(WIDE.get(t.dtype, t.dtype)) for n, t in traced.constants.items()}
    return replace(traced, program=replace(program, params=params, inputs=inputs), constants=constants)


def _wide(tree: Any) -> Any:
    return fx.node.map_aggregate(tree, lambda x: WIDE.get(x, x) if isinstance(x, torch.dtype) else x)


def _wide_spec(spec: Any) -> Any:
    return replace(spec, dtype=WIDE.get(spec.dtype, spec.dtype)) if isinstance(spec, Spec) else spec
