"""The Program: what every pass takes and gives.

Graphs are ``torch.fx.Graph``. Keys of ``node.meta``:

    spec     Spec, or a tuple of Specs where the op returns several tensors (None for a value that is no tensor)
    module   path of the module that made the node: "layers.3.attn"
    source   the user's line: "model.py:41 in forward: q = self.q(x)"
    diff     whether a gradient may flow through the value
    layout   Layout, or a tuple of them (from ANNOTATED on)
    requires tuple of Layouts: what the node wants of each tensor in ``tensor_args`` order (ANNOTATED only)
    param    on a placeholder: the parameter's or buffer's name (in a block: relative to the call's path)
    input    on a placeholder of the outer graph: index into ``Program.inputs``
    path     on a call of a block: the module path of the instance
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh


class Form(IntEnum):
    """How far a program has been lowered."""

    TRACED = 0
    ANNOTATED = 1
    RESHARDED = 2
    LOCAL = 3
    STAGED = 4


@dataclass(frozen=True)
class Spec:
    """Global shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        n = self.dtype.itemsize
        for s in self.shape:
            n *= s
        return n

    @property
    def is_float(self) -> bool:
        """Whether the dtype can carry a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class Param:
    """A parameter, buffer or constant of the model, by its first original name.

    ``tied`` are its further names. ``layout`` is None until the passes choose one.
    """

    name: str
    spec: Spec
    kind: str  # "parameter", "buffer" or "constant"
    trainable: bool = True
    persistent: bool = True
    tied: tuple[str, ...] = ()
    layout: Layout | None = None


@dataclass(frozen=True)
class Input:
    """A tensor that the caller passes. ``batch_dim`` is None where every data rank passes the same.

    ``rows`` are the rows of each data rank, row-major over the data axes, where there is a batch dim.
    """

    name: str
    spec: Spec
    batch_dim: int | None


@dataclass(frozen=True)
class Output:
    """What an entry of the outer graph's output is: a tensor of the model's output, the loss, or a buffer's new value."""

    kind: str  # "user", "loss" or "buffer"
    name: str
    batch_dim: int | None = None


@dataclass
class Block:
    """A kind of layer: one graph, called with different parameters.

    Placeholders: the values that it takes, then its parameters and buffers (``meta["param"]``: name relative to the call's path).
    The output node holds a tuple.
    """

    name: str
    graph: fx.Graph


@dataclass
class Program:
    """A model on a mesh.

    The outer ``graph`` has a placeholder for each parameter and each input, calls blocks with ``call_module`` (target:
    block name), and returns a flat tuple described by ``outputs``. All shapes are global until Form LOCAL.
    """

    mesh: Mesh
    graph: fx.Graph
    blocks: dict[str, Block]
    params: dict[str, Param]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    rows: tuple[int, ...] = ()
    form: Form = Form.TRACED
    notes: tuple[str, ...] = ()
    at: dict[str, int] = field(default_factory=dict)  # coordinates, where LOCAL sizes depend on them

    def clone(self) -> "Program":
        """A copy whose graphs can be edited; specs and layouts are shared, being immutable."""
        return replace(
            self,
            graph=copy_graph(self.graph),
            blocks={n: Block(b.name, copy_graph(b.graph)) for n, b in self.blocks.items()},
            params=dict(self.params),
            at=dict(self.at),
        )

    def graphs(self) -> Iterator[tuple[str, fx.Graph]]:
        """("", outer graph), then (name, graph) of each block."""
        yield "", self.graph
        for name, block in self.blocks.items():
            yield name, block.graph

    def calls(self) -> Iterator[fx.Node]:
        """The outer nodes that call a block."""
        return (n for n in self.graph.nodes if n.op == "call_module")

    def calls_of(self, block: str) -> list[fx.Node]:
        """The outer nodes that call ``block``."""
        return [n for n in self.calls() if n.target == block]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with shallow copies of every ``meta``."""
    out = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = out.node_copy(node, lambda n: env[n])
        new.meta = copy.copy(node.meta)
        env[node] = new
    return out


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The node's inputs that are tensors, in the order of its flattened args and kwargs, repeats kept."""
    found: list[fx.Node] = []

    def take(arg: Any) -> Any:
        if isinstance(arg, fx.Node) and isinstance(arg.meta.get("spec"), Spec):
            found.append(arg)
        return arg

    fx.node.map_aggregate(node.args, take)
    fx.node.map_aggregate(node.kwargs, take)
    return found


def specs(node: fx.Node) -> tuple[Spec | None, ...]:
    """The specs of what the node returns: one for most ops, several for ``split`` or a block."""
    spec = node.meta.get("spec")
    return spec if isinstance(spec, tuple) else (spec,)
