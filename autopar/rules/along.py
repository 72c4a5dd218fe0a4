"""Reductions and softmaxes over a sharded dim: the runtime ops that stand for them."""

from collections.abc import Callable
from math import prod
from typing import Any

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.program import tensor_args
from autopar.ir.runs import runs_of
from autopar.rules.arguments import arguments, normal_dims
from autopar.rules.place import Place
from autopar.rules.table import aten
from autopar.runtime import along, shards

Rewrite = Callable[[fx.Node, Place], None]


def handles(place: Place, dims: tuple[int, ...]) -> tuple[fx.Node, ...]:
    """Of the axes that share out ``dims`` of the first input; all sub-axes of an axis are that axis."""
    found = [a for d in dims for a, _ in place.inputs[0].shards(d)]
    names: dict[str, None] = {}
    for axis in found:
        base = place.mesh.base(axis)
        names[base if set(place.mesh.parts(base)) <= set(found) else axis] = None
    return tuple(map(place.handle, names))


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


def _extreme(way: str) -> Rewrite:
    """amax or amin."""

    def rewrite(node: fx.Node, place: Place) -> None:
        known, rank = arguments(node), len(tensor_args(node)[0].meta["spec"].shape)
        dims = normal_dims(known.get("dim"), rank)
        if axes := handles(place, dims):
            node.args = (known["self"], dims, bool(known["keepdim"]), way, axes)
            node.target, node.kwargs = along.extreme, {}

    return rewrite


def _extreme_at(way: str) -> Rewrite:
    """max or min along one dim, with indices."""

    def rewrite(node: fx.Node, place: Place) -> None:
        known, shape = arguments(node), tensor_args(node)[0].meta["spec"].shape
        dims = normal_dims(known["dim"], len(shape))
        if axes := handles(place, dims):
            total = shape[dims[0]]
            runs = runs_of(place.inputs[0], dims[0], total, place.mesh, place.at)
            node.args = (known["self"], dims[0], bool(known["keepdim"]), way, axes, runs, total)
            node.target, node.kwargs = along.extreme_at, {}

    return rewrite


def _logsumexp(node: fx.Node, place: Place) -> None:
    known, rank = arguments(node), len(tensor_args(node)[0].meta["spec"].shape)
    dims = normal_dims(known["dim"], rank)
    if axes := handles(place, dims):
        node.args = (known["self"], dims, bool(known["keepdim"]), axes)
        node.target, node.kwargs = along.logsumexp, {}


def _soft(target: Callable[..., Any]) -> Rewrite:
    """softmax or log_softmax; a cast is an op of its own."""

    def rewrite(node: fx.Node, place: Place) -> None:
        known, rank = arguments(node), len(tensor_args(node)[0].meta["spec"].shape)
        dims = normal_dims(known["dim"], rank)
        assert known["dtype"] is None, node
        if axes := handles(place, dims):
            node.args, node.target, node.kwargs = (known["self"], dims[0], axes), target, {}

    return rewrite


LOCAL: dict[Any, Rewrite] = {
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.logsumexp.default: _logsumexp,
    aten.softmax.int: _soft(along.softmax),
    aten.log_softmax.int: _soft(along.log_softmax),
    aten.amax.default: _extreme("max"),
    aten.amin.default: _extreme("min"),
    aten.max.dim: _extreme_at("max"),
    aten.min.dim: _extreme_at("min"),
}
