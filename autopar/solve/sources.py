"""Where a solve starts: which values nobody computes, and which factors of them an axis may shard."""

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir import ops
from autopar.ir.layout import Piece, Shard, plain_shard
from autopar.ir.mesh import TIME, Mesh
from autopar.ir.program import tensor_args
from autopar.rules.arguments import arguments
from autopar.rules.table import aten
from autopar.solve.flow import Flow

PRODUCTS = frozenset(
    {
        aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.baddbmm.default,
        aten.mv.default,
        aten.matmul.default, aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
        aten.embedding.default, ops.experts,
    }
)  # fmt: skip
ADDING = frozenset({aten.addmm.default, aten.baddbmm.default})
MOVES = frozenset(
    {
        aten.reshape.default, aten.view.default, aten.transpose.int, aten.t.default, aten.permute.default,
        aten.split_with_sizes.default, aten.unsqueeze.default, aten._to_copy.default, aten.select.int,
        aten.expand.default, aten.cat.default, aten.slice.Tensor, ops.stacked,
    }
)  # fmt: skip
NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default, aten.rsqrt.default})


def sources(flow: Flow) -> Iterator[int]:
    """Live values that no op makes: parameters, inputs and block arguments."""
    live = set(flow.at.values())
    return (i for i, v in enumerate(flow.values) if v.role != "op" and i in live)


def batch_shard(mesh: Mesh, axis: str, rows: tuple[int, ...]) -> Shard:
    """How the data axis ``axis`` shards dim 0 of an input whose data ranks hold ``rows``."""
    total, ways = sum(rows), mesh.size(axis)
    if axis == TIME:
        return Shard(0, (Piece(total, ways, rows[0] // ways),))
    if len(set(rows)) > 1:
        return Shard(0, (Piece(total, total, 1, rows),))
    names = mesh.data_axes
    inner = rows[0]
    for other in names[names.index(axis) + 1 :]:
        inner *= mesh.size(other)
    return Shard(0, (Piece(total, ways, inner),))


@dataclass(frozen=True)
class Weights:
    """What matrix products, convolutions and lookups take as weights.

    Args:
        parameters: those that reach one by moves, or by arithmetic with parameters.
        computed: values that parameters alone make: adapters merged into a weight, a scale of its rows.
    """

    parameters: frozenset[int]
    computed: frozenset[int]


def product_weights(flow: Flow) -> Weights:
    """The parameters and the values made of them alone that products, convolutions and lookups read."""
    only, arithmetic = of_parameters(flow)
    seen: set[int] = set()
    for node, _ in flow.ops:
        if node.target in PRODUCTS:
            seen |= _behind(flow, node, arithmetic, factors(flow, node))
    held = frozenset(v for v in seen if flow.values[v].role == "param")
    return Weights(held, frozenset(seen & only - held))


def product_parameters(flow: Flow) -> set[int]:
    """The parameters that products, convolutions and lookups read, with what they add."""
    _, arithmetic = of_parameters(flow)
    seen = (_behind(flow, node, arithmetic) for node, _ in flow.ops if node.target in PRODUCTS)
    return {v for v in set().union(*seen) if flow.values[v].role == "param"}


def of_parameters(flow: Flow) -> tuple[set[int], set[int]]:
    """(values that depend on parameters alone, those of them that are made element by element)."""
    only = {i for i, v in enumerate(flow.values) if v.role == "param"}
    arithmetic: set[int] = set()
    for node, _ in flow.ops:
        inputs = flow.inputs(node)
        if inputs and all(v in only for v in inputs):
            made = {v for v in flow.outputs(node) if v is not None}
            only |= made
            arithmetic |= made if torch.Tag.pointwise in getattr(node.target, "tags", ()) else set()
    return only, arithmetic


def factors(flow: Flow, node: fx.Node) -> list[int]:
    """A product's inputs but for what it adds: a bias is whole where rows of a weight are shared out."""
    known = arguments(node)
    added = known.get("bias", known.get("self") if node.target in ADDING else None)
    return [v for n, v in zip(tensor_args(node), flow.inputs(node)) if n is not added]


def _behind(flow: Flow, node: fx.Node, arithmetic: Set[int] = frozenset(), inputs: list[int] | None = None) -> set[int]:
    """Values behind a node's ``inputs``, all by default, through moves, block arguments and ``arithmetic``."""
    makers = flow.makers()
    feeds: dict[int, list[int]] = {}
    for g in flow.groups:
        for a in g.arguments:
            feeds.setdefault(a, []).append(g.value)
    seen: set[int] = set()
    todo = flow.inputs(node) if inputs is None else inputs
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in feeds:
            todo.extend(feeds[v])
        elif v in makers and (makers[v].target in MOVES or v in arithmetic):
            todo.extend(flow.inputs(makers[v]))
    return seen


def repeated_parameters(flow: Flow, attentions: list[fx.Node]) -> set[int]:
    """Weights that make the keys and values of grouped attention: whole where the ranks share a group of heads."""
    makers = flow.makers()
    found: set[int] = set()
    todo = [v for n in attentions for v in flow.inputs(n)[1:3]]
    seen: set[int] = set()
    while todo:
        v = todo.pop()
        if v in seen or v not in makers:
            continue
        seen.add(v)
        node = makers[v]
        if node.target in PRODUCTS:
            found |= {p for p in _behind(flow, node) if flow.values[p].role == "param"}
        else:
            todo.extend(flow.inputs(node))
    return found


def weight_seeds(flow: Flow, weights: Set[int], mesh: Mesh, axis: str) -> Iterator[tuple[int, Shard]]:
    """Every dim of every product's weight, in contiguous runs; a sub-axis shards within its major one."""
    parts = mesh.parts(mesh.base(axis))
    major = 1
    for part in parts[: parts.index(axis)]:
        major *= mesh.size(part)
    for v in sorted(weights):
        for dim, length in enumerate(flow.values[v].spec.shape):
            shard = within(dim, length, major, mesh.size(axis))
            if shard is not None:
                yield v, shard


def within(dim: int, length: int, major: int, ways: int) -> Shard | None:
    """A shard over ``ways`` of runs that ``major`` coordinates share; uneven only where there is no major axis."""
    if major == 1:
        return plain_shard(dim, length, ways)
    if length % (major * ways):
        return None
    return Shard(dim, (Piece(length, ways, length // (major * ways)),))


def sequence_seeds(flow: Flow, batch: dict[int, set[int]], mesh: Mesh, axis: str) -> Iterator[tuple[int, Shard]]:
    """The middle dims of what products and norms make or take: positions, not rows of the batch and not features.

    Another axis than cp shares out each of the chunks that cp will hold, in whatever order.
    """
    parts = mesh.parts(mesh.base(axis))
    major = 2 * mesh.size("cp") if mesh.size("cp") > 1 and mesh.base(axis) != "cp" else 1
    for part in parts[: parts.index(axis)]:
        major *= mesh.size(part)
    for node, _ in flow.ops:
        if node.target in PRODUCTS or node.target in NORMS or node.target is ops.dropout:
            for v in [*flow.inputs(node), *flow.outputs(node)]:
                if v is None or flow.values[v].role == "param" or not flow.values[v].spec.is_float:
                    continue
                shape = flow.values[v].spec.shape
                for dim in range(1, len(shape) - 1):
                    shard = within(dim, shape[dim], major, mesh.size(axis))
                    if dim not in batch.get(v, ()) and shard is not None and len(shape) == 3:
                        yield v, shard


def grouped(flow: Flow) -> list[tuple[fx.Node, int, int]]:
    """(attention node, query heads, key heads) of every attention."""
    found = []
    for node, _ in flow.ops:
        if node.target is ops.attention:
            known = arguments(node)
            q, k = known["q"].meta["spec"].shape, known["k"].meta["spec"].shape
            if len(q) > 2:
                found.append((node, q[-3], k[-3]))
    return found


def repeats(flow: Flow) -> list[tuple[fx.Node, int, int]]:
    """(expand node, merged size, groups): dims repeated and merged, as hand-written grouped attention does."""
    found = []
    makers = flow.makers()
    for node, _ in flow.ops:
        source = makers.get(flow.inputs(node)[0]) if node.target is aten.reshape.default else None
        if source is None or source.target is not aten.expand.default:
            continue
        before, after = source.args[0].meta["spec"].shape, source.meta["spec"].shape  # type: ignore[union-attr]
        if len(before) != len(after):
            continue
        grown = [d for d, (a, b) in enumerate(zip(before, after)) if a == 1 and b > 1]
        if len(grown) == 1 and grown[0] > 0 and before[grown[0] - 1] > 1:
            d = grown[0]
            if before[d - 1] * after[d] in node.meta["spec"].shape:
                found.append((source, before[d - 1] * after[d], before[d - 1]))
    return found
