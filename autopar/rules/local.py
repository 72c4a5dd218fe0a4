"""How an op's arguments change when it runs on shards: literal sizes, counts, offsets, random streams."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import Layout, Shard, local_inner, local_pieces, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.program import Spec, specs, tensor_args
from autopar.rules.arguments import arguments, normal_dims, with_arguments
from autopar.rules.table import aten
from autopar.runtime import collectives, loss, random, shards

Handle = Callable[[str], fx.Node]
Segments = tuple[tuple[int, tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Place:
    """Where an op runs: the mesh, this rank's coordinates, the layouts of its inputs and outputs, and axis handles."""

    mesh: Mesh
    at: Mapping[str, int]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    handle: Handle

    def shape(self, spec: Spec, layout: Layout) -> tuple[int, ...]:
        """Local shape of a global spec."""
        return local_shape(spec.shape, layout, self.mesh, self.at)


def segments_of(layout: Layout, axis: str, length: int, mesh: Mesh, at: Mapping[str, int]) -> Segments | None:
    """``segments`` of the runtime collectives for the shard on ``axis``; None where plain and even."""
    shard = layout[axis]
    assert isinstance(shard, Shard)
    others = Layout(tuple((a, t) for a, t in layout.types if a != axis))
    whole = local_pieces(others, shard.dim, length, mesh, at)
    if len(whole) != len(shard.pieces):
        whole = tuple(p.length * sum(whole) // length for p in shard.pieces)
    out = []
    for k, p in enumerate(shard.pieces):
        inner = local_inner(layout, axis, k, mesh, at)
        counts = p.sizes or (p.count // mesh.size(axis),) * mesh.size(axis)
        out.append((whole[k] // (p.count * inner), counts, inner))
    if len(out) == 1 and out[0][0] == 1 and shard.even:
        return None
    return tuple(out)


def run_start(layout: Layout, dim: int, length: int, mesh: Mesh, at: Mapping[str, int]) -> int:
    """Global index of the first local element of a dim held as one contiguous run."""
    start, inner_of_all = 0, length
    if not list(layout.shards(dim)):
        return 0
    for axis, shard in layout.shards(dim):
        p = shard.pieces[0]
        if len(shard.pieces) > 1:
            raise AutoparError("scattered-run", f"dim {dim} of {length} is held in several runs", None)
        start += p.start(at[axis], mesh.size(axis)) * p.inner
        inner_of_all = inner_of_all // p.count * p.share(at[axis], mesh.size(axis))
    if min(s.pieces[0].inner * s.pieces[0].share(at[a], mesh.size(a)) for a, s in layout.shards(dim)) != inner_of_all:
        raise AutoparError("scattered-run", f"dim {dim} of {length} is held in several runs", None)
    return start


def localize_node(node: fx.Node, place: Place) -> None:
    """Rewrite the node in place so that it computes on this rank's shards."""
    if node.target is ops.convert:
        convert(node, place)
    elif node.target in LOCAL:
        LOCAL[node.target](node, place)


def convert(node: fx.Node, place: Place) -> None:
    """A conversion becomes the runtime collective of its row."""
    x, axis, src, dst = node.args
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


def _mean(node: fx.Node, place: Place) -> None:
    known, shape = arguments(node), tensor_args(node)[0].meta["spec"].shape
    dims = normal_dims(known.get("dim"), len(shape))
    if not any(list(place.inputs[0].shards(d)) for d in dims):
        return
    x = node.args[0]
    if known.get("dtype") is not None:
        raise AutoparError(
            "mean-dtype", f"{node.meta.get('module', '')}: mean with a dtype over a sharded dim", "cast before the mean"
        )
    node.target, node.kwargs = shards.mean_of_total, {}
    node.args = (x, dims, bool(known.get("keepdim", False)), prod(shape[d] for d in dims))


def _embedding(node: fx.Node, place: Place) -> None:
    known = arguments(node)
    rows = known["weight"].meta["spec"].shape[0]
    if not list(place.inputs[0].shards(0)):
        return
    start = run_start(place.inputs[0], 0, rows, place.mesh, place.at)
    padding = known["padding_idx"]
    node.target, node.kwargs = loss.vocabulary_embedding, {}
    node.args = (known["weight"], known["indices"], start, padding if padding >= 0 else None, rows)


def _token_loss(node: fx.Node, place: Place) -> None:
    known = arguments(node)
    shape = known["logits"].meta["spec"].shape
    axes = [a for a, _ in place.inputs[0].shards(len(shape) - 1)]
    if not axes:
        return
    base = place.mesh.base(axes[0])
    name = base if set(axes) == set(place.mesh.parts(base)) else axes[0]
    assert name == base or len(axes) == 1
    start = run_start(place.inputs[0], len(shape) - 1, shape[-1], place.mesh, place.at)
    node.target, node.kwargs = loss.token_loss, {}
    node.args = (known["logits"], known["target"], known["ignore_index"], place.handle(name), start)


def _sharing(place: Place, which: int = 0) -> tuple[Any, ...]:
    """Handles of the axes along which ranks hold different parts of the value."""
    return tuple(place.handle(a) for a, t in place.inputs[which].types if isinstance(t, Shard))


def _dropout(node: fx.Node, place: Place) -> None:
    known = arguments(node)
    node.target, node.kwargs = random.dropout, {}
    node.args = (known["x"], known["p"], known["key"], _sharing(place), place.handle("rng"))


def _attention(node: fx.Node, place: Place) -> None:
    known = arguments(node)
    if not known["dropout"]:
        return
    node.target, node.kwargs = random.attention_with_dropout, {}
    node.args = (
        known["q"], known["k"], known["v"], known["mask"], known["dropout"], known["is_causal"], known["scale"],
        known["enable_gqa"], known["key"], _sharing(place), place.handle("rng"),
    )  # fmt: skip


LOCAL: dict[Any, Callable[[fx.Node, Place], None]] = {
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
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.embedding.default: _embedding,
    ops.token_loss: _token_loss,
    ops.dropout: _dropout,
    ops.attention: _attention,
}
