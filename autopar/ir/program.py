"""The Program: what every pass takes and gives.

Graphs are ``torch.fx.Graph``. Keys of ``node.meta``:

    spec     Spec, or a tuple of Specs where the op returns several tensors (None for a value that is no tensor)
    module   path of the module that made the node: "layers.3.attn"
    source   the user's line: "model.py:41 in forward: q = self.q(x)"
    diff     whether a gradient may flow through the value
    layout   Layout, or a tuple of them (from ANNOTATED on)
    requires tuple of Layouts: what the node wants of each tensor in ``tensor_args`` order (ANNOTATED only)
    param    on a placeholder: the parameter's or buffer's name (in a block: relative to the path of each call)
    input    on a placeholder of the outer graph: index into ``Program.inputs``
    path     on a call of a block: the module path of the instance
    stage    on a node of the outer graph: the pipeline stage that computes it, where ``Program.stages`` is set
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Layout, Shard
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
class Chunk:
    """How data ranks share out a rank's part of a parameter: dim ``dim`` in ``ways`` chunks, as ``torch.chunk`` cuts.

    The chunk of a data rank is its row-major place over ``axes``, modulo ``ways``; over all that the engine sums over
    where None.
    """

    dim: int
    ways: int
    axes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Group:
    """Parameters that an engine gathers and reduces together, around the calls of one unit.

    Args:
        unit: path of the call of a block, or "" for the outer function.
        dtype: of all its parameters.
        names: of its parameters.
        elements: of this rank's parts, before data ranks share them out; the trainable ones among them.
        keeps: whether gathered parameters stay from the forward to the backward.
        axes: over which their gradients are summed: those on which they are R.
        ways: ranks along these that share out a part.
    """

    unit: str
    dtype: torch.dtype
    names: tuple[str, ...]
    elements: int
    trainable: int
    keeps: bool
    axes: tuple[str, ...] = ()
    ways: int = 1


@dataclass(frozen=True)
class Engine:
    """How the data axes hold parameters and reduce gradients.

    Args:
        stage: ZeRO stage; 0 keeps a rank's parts whole.
        axes: the data axes with several ranks.
        ways: data ranks that share out a part that all of them have; the others repeat it.
        copies: how often a part is repeated.
        precision: "fp32", or "bf16": computed from copies of fp32 parameters, gradients reduced in fp32.
        offload: "none" or "cpu".
        prefetch: units that are gathered ahead; 0 leaves it to the engine.
        groups: in order of the units' calls, those of the outer function last.
    """

    stage: int = 0
    axes: tuple[str, ...] = ()
    ways: int = 1
    copies: int = 1
    precision: str = "fp32"
    offload: str = "none"
    prefetch: int = 0
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Stages:
    """How the outer graph is cut into the stages of a pipeline, and in which order they run.

    Args:
        names: of each stage, the module with which it begins.
        ranks: of each stage, the coordinate on ``pp`` that runs it.
        schedule: "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv" or "dualpipev".
        microbatches: of a training step.
        seconds: predicted for a microbatch in each stage: forward, gradients of inputs, gradients of weights.
        reason: why it is cut and scheduled so.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    schedule: str
    microbatches: int
    seconds: tuple[tuple[float, float, float], ...] = ()
    reason: str = ""

    def of(self, coordinate: int) -> tuple[int, ...]:
        """The stages that a coordinate on ``pp`` runs."""
        return tuple(s for s, rank in enumerate(self.ranks) if rank == coordinate)


@dataclass(frozen=True)
class Param:
    """A parameter, buffer or constant of the model, by its first original name.

    ``tied`` are its further names. ``layout`` is None until the passes choose one. ``chunk`` is None where data ranks
    repeat the parameter. ``stages`` are those that read it; empty where there are no stages. ``order`` says which
    index of dim 0 lies at each place that the layout shares out; None where it is the model's own.
    """

    name: str
    spec: Spec
    kind: str  # "parameter", "buffer" or "constant"
    trainable: bool = True
    persistent: bool = True
    tied: tuple[str, ...] = ()
    layout: Layout | None = None
    chunk: Chunk | None = None  # from STAGED on
    stages: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None

    def with_layout(self, layout: Layout) -> "Param":
        """The parameter with another layout. As ``dataclasses.replace``, which deep models wait for."""
        new = object.__new__(Param)
        new.__dict__.update(self.__dict__, layout=layout)
        return new

    def summed_over(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes over which the engine sums the gradient: those of ``mesh.summed_axes`` that do not shard it."""
        return _summed_over(self.layout or Layout(), mesh)


@lru_cache(maxsize=4096)
def _summed_over(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    axes = (a for a in mesh.summed_axes if mesh.size(a) > 1)
    return tuple(a for a in axes if not isinstance(layout.get(a), Shard))


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
    """An entry of the outer graph's output: a tensor of the model's output, the loss, or a buffer's new value."""

    kind: str  # "user", "loss" or "buffer"
    name: str
    batch_dim: int | None = None


@dataclass
class Block:
    """A kind of layer: one graph, called with different parameters.

    Placeholders: the values that calls pass, its own parameters and buffers (``meta["param"]``: name relative to the
    call's path, which alone says which they are), then handles. The output node holds a tuple.
    """

    name: str
    graph: fx.Graph
    recompute: str = "none"  # what its backward computes again: "none", "selective" or "full"

    def own(self) -> list[fx.Node]:
        """The placeholders of its own parameters and buffers."""
        return [n for n in self.graph.find_nodes(op="placeholder") if "param" in n.meta]

    def taken(self) -> list[fx.Node]:
        """The placeholders of what calls pass."""
        return [n for n in self.graph.find_nodes(op="placeholder") if "param" not in n.meta]


@dataclass
class Program:
    """A model on a mesh.

    The outer ``graph`` has a placeholder for each input and each parameter that it reads itself, calls blocks with
    ``call_module`` (target: block name; arguments: all that the block takes but its own parameters), and returns a flat
    tuple described by ``outputs``. All shapes are global until Form LOCAL.
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
    engine: Engine | None = None  # from STAGED on
    stages: Stages | None = None

    def clone(self) -> "Program":
        """A copy whose graphs can be edited; specs and layouts are shared, being immutable."""
        return replace(
            self,
            graph=copy_graph(self.graph),
            blocks={n: Block(b.name, copy_graph(b.graph), b.recompute) for n, b in self.blocks.items()},
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

    def own(self, call: fx.Node) -> list[tuple[fx.Node, str]]:
        """(placeholder of its block, name) of each parameter and buffer that a call reads by its path."""
        heads = self.blocks[str(call.target)].own()
        return list(zip(heads, _names(call.meta.get("path", ""), _own(heads))))

    def given(self, call: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """(placeholder of its block, node of the outer graph) of each argument of a call. A ValueError if one lacks."""
        return list(zip(self.blocks[str(call.target)].taken(), call.args, strict=True))  # type: ignore[arg-type]

    def held(self) -> Iterator[tuple[fx.Node, str]]:
        """(placeholder, name) of each parameter and buffer that the program reads; those of equal layers share one."""
        own = {name: block.own() for name, block in self.blocks.items()}
        relative = {name: _own(heads) for name, heads in own.items()}
        for call in self.calls():
            yield from zip(own[call.target], _names(call.meta.get("path", ""), relative[call.target]))  # type: ignore[index]
        heads = self.graph.find_nodes(op="placeholder")
        yield from ((n, str(n.meta["param"])) for n in heads if "param" in n.meta)

    def reads(self, node: fx.Node) -> list[str]:
        """The parameters and buffers that an outer node reads; a call its own, and those that are passed to it."""
        own = [name for _, name in self.own(node)] if node.op == "call_module" else []
        return own + _passed(node)

    def readers(self) -> Iterator[tuple[fx.Node, list[str]]]:
        """Each outer node with what it ``reads``; the blocks are looked at once."""
        relative = {name: _own(block.own()) for name, block in self.blocks.items()}
        for node in self.graph.nodes:
            own = _names(node.meta.get("path", ""), relative[str(node.target)]) if node.op == "call_module" else ()
            yield node, [*own, *_passed(node)]


def _own(heads: list[fx.Node]) -> tuple[str, ...]:
    return tuple(n.meta["param"] for n in heads)


def _passed(node: fx.Node) -> list[str]:
    return [str(a.meta["param"]) for a in node.all_input_nodes if a.op == "placeholder" and "param" in a.meta]


@lru_cache(maxsize=4096)
def _names(path: str, own: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a call's parameters: asked for by every pass and check, of every layer."""
    return tuple(f"{path}.{name}" for name in own)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with shallow copies of every ``meta``."""
    out = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = copy_node(out, node, env)
    return out


def copy_node(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy at the graph's insertion point, of arguments that ``env`` gives, with a shallow copy of ``meta``.

    What ``Graph.node_copy`` does, but for a search for symbols among the arguments, which takes most of its time.
    """
    args = fx.map_arg(node.args, env.__getitem__) if node.args else ()
    kwargs = fx.map_arg(node.kwargs, env.__getitem__) if node.kwargs else node.kwargs
    name = graph._graph_namespace.create_name(node.name, None)
    new = fx.Node(graph, name, node.op, node.target, args, kwargs, node.type)
    graph._graph_namespace.associate_name_with_obj(name, new)
    graph._insert(new)
    graph._find_nodes_lookup_table.insert(new)
    graph._len += 1
    new.meta = dict(node.meta)
    return new


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
