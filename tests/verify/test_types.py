"""The LOCAL program's collectives under the ``spmd-types`` checker: an independent judge of the same types."""

from typing import Any

import pytest
import spmd_types as spmd
import torch
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import I, P, R, Shard, Type
from autopar.ir.program import Program
from autopar.passes.pipeline import run
from autopar.runtime.axis import Axis
from autopar.solve.annotate import layout_of
from tests.passes.models import planned
from tests.runtime.oracle import TYPES, checking, group, stamp, typed
from tests.runtime.table import ROWS

MESH = "dp=2,tp=2"
PIPELINES = ("data-parallel,tensor-parallel", "data-parallel,tensor-parallel{sequence}")
NAMES: dict[Type, str] = {I: "I", R: "R", P: "P"}


def name_of(kind: Type) -> str:
    return "S" if isinstance(kind, Shard) else NAMES[kind]


def resharded(pipeline: str) -> Program:
    return planned("llama", MESH, f"{pipeline},reshard")


def conversions(program: Program) -> list[int]:
    """Places in the block of the conversions that carry a gradient."""
    graph = next(iter(program.blocks.values())).graph
    return [i for i, n in enumerate(graph.nodes) if n.target is ops.convert and n.meta["diff"]]


def interpret(graph: fx.Graph, axes: dict[str, Axis]) -> list[Tensor]:
    """Run the block on rank 0: inputs have their types, conversions check theirs, other ops are the checker's."""
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = axes[node.meta["handle"]] if "handle" in node.meta else _input(node, axes)
        elif node.op == "output":
            return [env[n] for n in node.args[0]]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            runtime = getattr(node.target, "__name__", "") in (*ROWS, "all_to_all")
            made = (typed(node.target) if runtime else node.target)(*args, **kwargs)
            env[node] = made if runtime or not isinstance(made, Tensor) else _summed(made, node, axes)
    raise AssertionError("no output")


def _input(node: fx.Node, axes: dict[str, Axis]) -> Tensor:
    spec, kinds = node.meta["spec"], dict(layout_of(node).types)
    x = torch.randn(spec.shape, dtype=spec.dtype) if spec.is_float else torch.ones(spec.shape, dtype=spec.dtype)
    x = x.requires_grad_(bool(node.meta["diff"]))
    flows = x.requires_grad
    return stamp(x, axes, **{a: name_of(R if not flows and k == I else k) for a, k in kinds.items()})


def _summed(x: Tensor, node: fx.Node, axes: dict[str, Axis]) -> Tensor:
    """A product over a sharded dim varies; that it is a term of a sum is what only its rule can say."""
    for axis in layout_of(node).partial:
        if spmd.get_local_type(x).get(spmd.normalize_axis(group(axes[axis]))) == spmd.V:
            x = spmd.reinterpret(x, group(axes[axis]), src=spmd.V, dst=spmd.P)
    return x


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_block_is_well_typed(pipeline: str) -> None:
    local = run(resharded(pipeline), "localize")
    block = next(iter(local.blocks.values()))
    out = next(n for n in reversed(block.graph.nodes) if n.op == "output").args[0]
    with checking(MESH) as axes:
        for made, node in zip(interpret(block.graph, axes), out, strict=True):
            spmd.assert_type(made, {group(axes[a]): TYPES[name_of(k)] for a, k in layout_of(node).types})


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_block_without_one_of_its_conversions_is_not(pipeline: str) -> None:
    program = resharded(pipeline)
    places = conversions(program)
    assert len(places) >= 3
    kinds = set()
    for place in places:
        broken = program.clone()
        node = list(next(iter(broken.blocks.values())).graph.nodes)[place]
        row = name_of(node.args[2]) + name_of(node.args[3])
        kinds.add(row)
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)
        local = run(broken, "localize", verify=False)
        block = next(iter(local.blocks.values()))
        out = next(n for n in reversed(block.graph.nodes) if n.op == "output").args[0]
        sizes = (RuntimeError, AutoparError) if "S" in row else ()  # without it a shard meets another size
        with checking(MESH) as axes, pytest.raises((spmd.SpmdTypeError, *sizes)):
            for made, want in zip(interpret(block.graph, axes), out, strict=True):
                spmd.assert_type(made, {group(axes[a]): TYPES[name_of(k)] for a, k in layout_of(want).types})
    assert kinds >= ({"SR", "PS"} if "sequence" in pipeline else {"IR", "PI"})
