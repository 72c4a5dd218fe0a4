"""How an op's arguments change when it runs on shards: literal sizes, counts, offsets, random streams."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.grouped import Body, written
from autopar.ir.layout import I, Layout, Piece, Shard
from autopar.ir.program import Spec, specs, tensor_args
from autopar.ir.runs import runs_of
from autopar.rules import along
from autopar.rules.arguments import arguments, with_arguments
from autopar.rules.experts import graph_of, layouts_inside, results_of
from autopar.rules.place import Place, every_segment, run_start, segments_of
from autopar.rules.table import aten
from autopar.runtime import collectives, dispatch, loss, order, random, shards
from autopar.runtime.ring import ring_attention, whole_attention


def localize_node(node: fx.Node, place: Place) -> None:
    """Rewrite the node in place so that it computes on this rank's shards."""
    if node.target is ops.convert:
        convert(node, place)
    elif node.target in LOCAL:
        LOCAL[node.target](node, place)


def convert(node: fx.Node, place: Place) -> None:
    """A conversion becomes the runtime collective of its row."""
    x, axis, src, dst = node.args
    if any(isinstance(t, Shard) and t.zigzag for t in (src, dst)):
        zigzag(node, place)
        return
    spec, have = node.meta["spec"], place.inputs[0]
    handle = place.handle(axis)  # type: ignore[arg-type]

    def cut(layout: Layout, shard: Shard) -> tuple[Any, ...]:
        segments = segments_of(layout, axis, spec.shape[shard.dim], place.mesh, place.at)  # type: ignore[arg-type]
        return (shard.dim, handle) if segments is None else (shard.dim, handle, segments)

    after = have.having(axis, dst)  # type: ignore[arg-type]
    if isinstance(src, Shard) and isinstance(dst, Shard):
        a, b = cut(have, src), cut(after, dst)
        node.args = (
            (x, src.dim, dst.dim, handle, *a[2:])
            if len(b) == 2
            else (x, src.dim, dst.dim, handle, a[2] if len(a) > 2 else None, b[2])
        )
        node.target = collectives.all_to_all
        return
    node.target = ROWS[type(src).__name__[0] + type(dst).__name__[0]]
    shard, layout = (src, have) if isinstance(src, Shard) else (dst, after)
    node.args = (x, *cut(layout, shard)) if isinstance(shard, Shard) else (x, handle)


def zigzag(node: fx.Node, place: Place) -> None:
    """A conversion from or to zigzag order: the collective of plain runs, and the chunks put in the other order.

    What leaves a shard is put in the order of the whole behind the collective, what becomes one before it.
    """
    x, axis, src, dst = node.args
    assert isinstance(axis, str) and isinstance(x, fx.Node)
    if isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim:
        whole = _before(node, ops.convert, (x, axis, src, I), place.inputs[0].having(axis, I))
        convert(whole, replace(place, outputs=(whole.meta["layout"],)))
        node.args = (whole, axis, I, dst)
        convert(node, replace(place, inputs=(whole.meta["layout"],)))
        return
    have = place.inputs[0]
    if isinstance(dst, Shard) and dst.zigzag:
        args = (x, *_chunks(dst, have.having(axis, dst), axis, node.meta["spec"], place))
        x = _before(node, order.by_rank, args, have)
    if isinstance(src, Shard) and src.zigzag:
        moved = _before(node, ops.convert, (x, axis, _plain(src), _plain(dst)), have.having(axis, dst))
        convert(moved, replace(place, inputs=(have.having(axis, _plain(src)),)))
        node.args = (moved, *_chunks(src, have, axis, node.meta["spec"], place))
        node.target, node.kwargs = order.as_whole, {}
        return
    node.args = (x, axis, src, _plain(dst))
    convert(node, place)


def _plain(kind: Any) -> Any:
    """The type of what is held once the chunks lie in the order of ranks."""
    if not isinstance(kind, Shard) or not kind.zigzag:
        return kind
    p = kind.pieces[0]
    ways = len(p.chunks) // 2
    shares = tuple(sum(n for _, n in p.runs(c, ways)) for c in range(ways))
    return Shard(kind.dim, (Piece(p.length, p.count, p.inner, shares),))


def _chunks(shard: Shard, layout: Layout, axis: str, spec: Spec, place: Place) -> tuple[Any, ...]:
    """Arguments of ``runtime.order``: dim, repeats of the factor, its chunks, local elements of one index."""
    (segment,) = every_segment(layout, axis, spec.shape[shard.dim], place.mesh, place.at)
    return shard.dim, segment[0], shard.pieces[0].chunks, segment[2]


def _before(node: fx.Node, target: Any, args: tuple[Any, ...], layout: Layout) -> fx.Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    new.meta = {**node.meta, "layout": layout}
    return new


ROWS: dict[str, Callable[..., Any]] = {
    "SR": collectives.all_gather,
    "SI": collectives.all_gather_invariant,
    "SP": collectives.shard_to_partial,
    "IR": collectives.to_replicated,
    "IS": collectives.slice_invariant,
    "IP": collectives.invariant_to_partial,
    "RS": collectives.slice_replicated,
    "RI": collectives.to_invariant,
    "RP": collectives.replicated_to_partial,
    "PI": collectives.all_reduce_invariant,
    "PR": collectives.all_reduce,
    "PS": collectives.reduce_scatter,
}


def _output_size(name: str) -> Callable[[fx.Node, Place], None]:
    """The argument ``name`` is the output's shape."""

    def rewrite(node: fx.Node, place: Place) -> None:
        with_arguments(node, **{name: list(place.shape(node.meta["spec"], place.outputs[0]))})

    return rewrite


def _split(node: fx.Node, place: Place) -> None:
    dim = arguments(node)["dim"] % len(node.args[0].meta["spec"].shape)  # type: ignore[union-attr]
    sizes = [place.shape(s, lay)[dim] for s, lay in zip(specs(node), place.outputs) if s]
    with_arguments(node, split_sizes=sizes)


def _squeeze(node: fx.Node, place: Place) -> None:
    """A dim may have one local element and several global ones: only the output's shape says which dims go."""
    node.target, node.kwargs = aten.reshape.default, {}
    node.args = (node.args[0], list(place.shape(node.meta["spec"], place.outputs[0])))


def _repeat(node: fx.Node, place: Place) -> None:
    after = place.shape(node.meta["spec"], place.outputs[0])
    before = place.shape(tensor_args(node)[0].meta["spec"], place.inputs[0])
    ahead = len(after) - len(before)
    with_arguments(node, repeats=[*after[:ahead], *(a // b for a, b in zip(after[ahead:], before))])


def _convolution(node: fx.Node, place: Place) -> None:
    """A rank has as many groups as its share of the channels."""
    groups, made = arguments(node).get("groups", 1), node.meta["spec"]
    dim = len(made.shape) - len(tensor_args(node)[1].meta["spec"].shape) + 1  # of channels: there may be no batch
    if groups != 1:
        with_arguments(node, groups=groups * place.shape(made, place.outputs[0])[dim] // made.shape[dim])


def _embedding(node: fx.Node, place: Place) -> None:
    known = arguments(node)
    rows = known["weight"].meta["spec"].shape[0]
    if not list(place.inputs[0].shards(0)):
        return
    runs = runs_of(place.inputs[0], 0, rows, place.mesh, place.at)
    padding = known["padding_idx"]
    node.target, node.kwargs = loss.vocabulary_embedding, {}
    node.args = (known["weight"], known["indices"], runs, padding if padding >= 0 else None, rows)


def _token_loss(node: fx.Node, place: Place) -> None:
    known = arguments(node)
    shape = known["logits"].meta["spec"].shape
    axes = [a for a, _ in place.inputs[0].shards(len(shape) - 1)]
    if not axes:
        return
    base = place.mesh.base(axes[0])
    name = base if set(axes) == set(place.mesh.parts(base)) else axes[0]
    assert name == base or len(axes) == 1
    runs = runs_of(place.inputs[0], len(shape) - 1, shape[-1], place.mesh, place.at)
    node.target, node.kwargs = loss.token_loss, {}
    node.args = (known["logits"], known["target"], known["ignore_index"], place.handle(name), runs, shape[-1])


def _sharing(place: Place, which: int = 0) -> tuple[Any, ...]:
    """Handles of the axes along which ranks hold different parts of the value."""
    return tuple(place.handle(a) for a, t in place.inputs[which].types if isinstance(t, Shard))


def _drawn(target: Callable[..., Any]) -> Callable[[fx.Node, Place], None]:
    """The op of three arguments, the last its key, as ``target`` draws it on shards."""

    def rewrite(node: fx.Node, place: Place) -> None:
        node.args = (*arguments(node).values(), _sharing(place), place.handle("rng"))
        node.target, node.kwargs = target, {}

    return rewrite


MASKS = ("bias", "sink", "cap", "band", "query_ids", "key_ids")  # arguments of attention beside mask and fill

WRITTEN = ("bias", "sink", "cap", "fill")  # of these, what no kernel takes: it would hold every score


def _attention(node: fx.Node, place: Place) -> None:
    """Dropped probabilities are drawn by rank; bands, numbers and, on cp, what kernels lack are computed in tiles."""
    known = arguments(node)
    rest = tuple(known[n] for n in MASKS)
    if not known["dropout"]:
        both = known["is_causal"] and known["mask"] is not None
        apart = ("band", "query_ids", *(WRITTEN if place.mesh.size("cp") > 1 else ()))
        if both or any(known[n] is not None for n in apart):
            node.target, node.kwargs = whole_attention, {}
            node.args = tuple(known[n] for n in ("q", "k", "v", "mask", "is_causal", "scale", "fill", *MASKS))
        return
    node.target, node.kwargs = random.attention_with_dropout, {}
    node.args = (
        known["q"], known["k"], known["v"], known["mask"], known["dropout"], known["is_causal"], known["scale"],
        known["enable_gqa"], known["key"], _sharing(place), place.handle("rng"), known["fill"], *rest,
    )  # fmt: skip


def _experts(node: fx.Node, place: Place) -> None:
    """An axis that shares out rows and experts exchanges rows; on others a rank has the experts from a number on."""
    with_arguments(node, body=_local_body(node, place))
    known, rows, owned = arguments(node), place.inputs[0], place.inputs[3]
    over = [a for a, _ in owned.shards(0)]
    exchange = [a for a in over if any(a == b for b, _ in rows.shards(0))]
    assert not exchange or over == exchange[:1], over
    if exchange:
        node.target, node.kwargs = dispatch.dispatched_experts, {}
        given = tuple(known[n] for n in ("hidden", "index", "weights", "params", "body", "dtype"))
        layer, load = str(node.meta.get("module") or ""), place.handle("load")
        node.args = (
            *given, _room(known, place, exchange[0]), layer, known["chunks"], load, place.handle(exchange[0])
        )  # fmt: skip
    elif over:
        count = known["params"][0].meta["spec"].shape[0]
        with_arguments(node, first=run_start(owned, 0, count, place.mesh, place.at))


def _room(known: dict[str, Any], place: Place, axis: str) -> int | None:
    """Rows that each rank sends to an expert: ``capacity`` times the mean of the rank with the most tokens."""
    if known["capacity"] is None:
        return None
    tokens, choices = known["index"].meta["spec"].shape
    held = (
        runs_of(place.inputs[1], 0, tokens, place.mesh, {**place.at, axis: c}) for c in range(place.mesh.size(axis))
    )
    most = max(sum(n for _, n in runs) for runs in held)
    return max(1, ceil(known["capacity"] * most * choices / known["params"][0].meta["spec"].shape[0]))


def _stacked(node: fx.Node, place: Place) -> None:
    """Of experts that belong to ranks a rank stacks its own."""
    params: Any = node.args
    owners = [next(((a, s.owner) for a, s in lay.shards(0) if s.owner is not None), None) for lay in place.inputs]
    if not any(owners):
        return
    own = [o is None or place.at[o[0]] == o[1] for o in owners]
    first = [p for p, mine in zip(params, own, strict=True) if mine]
    node.target = shards.owned_stack
    node.args = (len(first), *first, *(p for p, mine in zip(params, own, strict=True) if not mine))


def _local_body(node: fx.Node, place: Place) -> Body:
    """The body with the sizes that this rank's shares of each expert have."""
    known = arguments(node)
    params = tuple(p.meta["spec"] for p in known["params"])
    graph = graph_of(known["body"], known["hidden"].meta["spec"], params)
    layouts = layouts_inside(graph, (*place.inputs, place.outputs[0]))
    at = {n: i for i, n in enumerate((graph.x, *graph.params, *graph.ops))}
    steps = []
    for step, op in zip(known["body"], graph.ops, strict=True):
        if op.target in LOCAL:
            before, made = op.target, tuple(layouts[n] for n in results_of(op))
            inside = Place(place.mesh, place.at, tuple(layouts[n] for n in tensor_args(op)), made, place.handle)
            localize_node(op, inside)
            if op.target is not before:
                why = f"{node.meta.get('module') or 'experts'}: {step[0]} inside an expert, over a sharded dim"
                raise AutoparError("expert-body", why, "leave tp off the experts: use ep")
            given = tuple(written(a, at) for a in op.args)
            step = (step[0], given, tuple((k, written(v, at)) for k, v in op.kwargs.items()))
        steps.append(step)
    return tuple(steps)


def _ring(node: fx.Node, place: Place) -> None:
    """Positions of this rank's queries and of every coordinate's keys, as runs."""
    known = arguments(node)
    axis, (q, k) = known["axis"], (known[n].meta["spec"].shape for n in ("q", "k"))
    over = {a for x, s in zip(place.inputs, (q, k)) for a, _ in x.shards(len(s) - 2)}
    if not over:
        node.target, node.kwargs = ops.attention, {n: v for n, v in node.kwargs.items() if n != "axis"}
        node.args = node.args[:16]
        _attention(node, place)
        return
    if over != {axis}:
        axes = ", ".join(sorted(over))
        what = f"{node.meta.get('module', '')}: attention has positions sharded over {axes}, its ring runs over {axis}"
        raise AutoparError("ring-axes", what, "leave sequence_parallel off together with context parallelism")
    keys = tuple(
        runs_of(place.inputs[1], len(k) - 2, k[-2], place.mesh, {**place.at, axis: c})
        for c in range(place.mesh.size(axis))
    )
    queries = runs_of(place.inputs[0], len(q) - 2, q[-2], place.mesh, place.at)
    node.target, node.kwargs = ring_attention, {}
    node.args = (
        known["q"], known["k"], known["v"], known["mask"], known["is_causal"], known["scale"], known["fill"],
        queries, keys, place.handle(axis), *(known[n] for n in MASKS),
    )  # fmt: skip


def _select(node: fx.Node, place: Place) -> None:
    known, shape = arguments(node), tensor_args(node)[0].meta["spec"].shape
    dim = known["dim"] % len(shape)
    if not list(place.inputs[0].shards(dim)):
        return
    wanted, at, found = known["index"] % shape[dim], 0, None
    for start, length in runs_of(place.inputs[0], dim, shape[dim], place.mesh, place.at):
        if start <= wanted < start + length:
            found = at + wanted - start
        at += length
    node.target, node.kwargs = shards.selected, {}
    node.args = (known["self"], dim, found)


def _gather(node: fx.Node, place: Place) -> None:
    known, shape = arguments(node), tensor_args(node)[0].meta["spec"].shape
    dim = known["dim"] % len(shape)
    if not list(place.inputs[0].shards(dim)):
        return
    runs = runs_of(place.inputs[0], dim, shape[dim], place.mesh, place.at)
    node.target, node.kwargs = shards.gathered, {}
    node.args = (known["self"], dim, known["index"], runs, shape[dim])


def _slice(node: fx.Node, place: Place) -> None:
    """Of a sharded dim: what of the rank's runs lies inside, which is one run of its local tensor."""
    known, shape = arguments(node), tensor_args(node)[0].meta["spec"].shape
    dim = known["dim"] % len(shape)
    if not list(place.inputs[0].shards(dim)):
        return
    runs = runs_of(place.inputs[0], dim, shape[dim], place.mesh, place.at)
    first = known["start"] or 0
    first = max(0, first + shape[dim]) if first < 0 else first
    start = sum(max(0, min(first - s, n)) for s, n in runs)
    length = place.shape(node.meta["spec"], place.outputs[0])[dim]
    with_arguments(node, dim=dim, start=start, end=start + length)


LOCAL: dict[Any, Callable[[fx.Node, Place], None]] = {
    **along.LOCAL,
    aten.select.int: _select,
    aten.gather.default: _gather,
    aten.slice.Tensor: _slice,
    ops.ring_attention: _ring,
    aten.reshape.default: _output_size("shape"),
    aten.view.default: _output_size("size"),
    aten.expand.default: _output_size("size"),
    aten.full.default: _output_size("size"),
    aten.zeros.default: _output_size("size"),
    aten.ones.default: _output_size("size"),
    aten.new_zeros.default: _output_size("size"),
    aten.new_ones.default: _output_size("size"),
    aten.new_full.default: _output_size("size"),
    aten.repeat.default: _repeat,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.split_with_sizes.default: _split,
    aten.embedding.default: _embedding,
    aten.convolution.default: _convolution,
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv3d.default: _convolution,
    ops.token_loss: _token_loss,
    ops.dropout: _drawn(random.dropout),
    ops.draw: _drawn(random.draw),
    ops.attention: _attention,
    ops.experts: _experts,
    ops.stacked: _stacked,
}
