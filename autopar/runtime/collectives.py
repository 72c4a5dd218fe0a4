"""Conversions between what a value is on a mesh axis: invariant, replicated, partial, or sharded.

One function for each row of the conversion table. All are linear, and each one's backward is its dual, which the
table holds too, so gradients of any order are right. The types and their duality are those of the ``spmd-types``
package. N is the axis size, b the bytes of the whole value.

Common arguments:

    x         this rank's tensor, of any dtype
    dim       the tensor dim that is sharded; negative counts from the end
    axis      the mesh axis; where its size is 1 the function returns ``x``
    segments  None for a plain even shard, else the shares (``runtime.segments``)

All raise AutoparError ``bad-segments`` where the dim is not as long as the shares say.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.runtime._functional import exchanged, gathered, reduced, scattered
from autopar.runtime.axis import Axis
from autopar.runtime.segments import (
    Segments,
    check_local,
    check_whole,
    is_even_run,
    join,
    lead,
    local_length,
    pad,
    place,
    take,
    unlead,
)


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Callable[..., Tensor], dual: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.dual, ctx.args = dual, args
        return kernel(x, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.dual(grads[0], *ctx.args), None, None, *(None for _ in ctx.args)


def _run(x: Tensor, axis: Axis, kernel: Callable[..., Tensor], dual: Callable[..., Tensor], *args: Any) -> Tensor:
    if axis.size == 1:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        out: Tensor = _Conversion.apply(x, kernel, dual, *args)
        return out
    return kernel(x, *args)


def all_gather(x: Tensor, dim: int, axis: Axis, segments: Segments | None = None) -> Tensor:
    """S → R: the whole on every rank, b(N-1)/N on the wire. Backward: ``reduce_scatter``."""
    return _run(x, axis, _gather, reduce_scatter, dim % x.dim(), axis, segments)


def all_gather_invariant(x: Tensor, dim: int, axis: Axis, segments: Segments | None = None) -> Tensor:
    """S → I: the whole on every rank, b(N-1)/N on the wire. Backward: the local slice."""
    return _run(x, axis, _gather, slice_invariant, dim % x.dim(), axis, segments)


def shard_to_partial(x: Tensor, dim: int, axis: Axis, segments: Segments | None = None) -> Tensor:
    """S → P: zero outside this rank's share. Backward: the local slice."""
    return _run(x, axis, _place, slice_replicated, dim % x.dim(), axis, segments)


def to_replicated(x: Tensor, axis: Axis) -> Tensor:
    """I → R: the same tensor. Backward: an all-reduce, 2b(N-1)/N on the wire."""
    return _run(x, axis, _same, all_reduce_invariant, axis)


def slice_invariant(x: Tensor, dim: int, axis: Axis, segments: Segments | None = None) -> Tensor:
    """I → S: the local slice. Backward: ``all_gather_invariant``."""
    return _run(x, axis, _take, all_gather_invariant, dim % x.dim(), axis, segments)


def invariant_to_partial(x: Tensor, axis: Axis) -> Tensor:
    """I → P: kept on coordinate 0, zero elsewhere. Backward: nothing."""
    return _run(x, axis, _keep, to_invariant, axis)


def slice_replicated(x: Tensor, dim: int, axis: Axis, segments: Segments | None = None) -> Tensor:
    """R → S: the local slice. Backward: zero outside this rank's share."""
    return _run(x, axis, _take, shard_to_partial, dim % x.dim(), axis, segments)


def to_invariant(x: Tensor, axis: Axis) -> Tensor:
    """R → I: the same tensor. Backward: the gradient is kept on coordinate 0, zero elsewhere."""
    return _run(x, axis, _same, invariant_to_partial, axis)


def replicated_to_partial(x: Tensor, axis: Axis) -> Tensor:
    """R → P: kept on coordinate 0, zero elsewhere. Backward: the same."""
    return _run(x, axis, _keep, replicated_to_partial, axis)


def all_reduce_invariant(x: Tensor, axis: Axis) -> Tensor:
    """P → I: the sum, 2b(N-1)/N on the wire. Backward: nothing."""
    return _run(x, axis, reduced, to_replicated, axis)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """P → R: the sum, 2b(N-1)/N on the wire. Backward: the same."""
    return _run(x, axis, reduced, all_reduce, axis)


def reduce_scatter(x: Tensor, dim: int, axis: Axis, segments: Segments | None = None) -> Tensor:
    """P → S: this rank's share of the sum, b(N-1)/N on the wire. Backward: ``all_gather``."""
    return _run(x, axis, _scatter, all_gather, dim % x.dim(), axis, segments)


def all_to_all(
    x: Tensor,
    src_dim: int,
    dst_dim: int,
    axis: Axis,
    src_segments: Segments | None = None,
    dst_segments: Segments | None = None,
) -> Tensor:
    """S(src) → S(dst), b(N-1)/N² on the wire from each rank. Backward: the reverse.

    Between two shards of one dim it is a gather and a slice, b(N-1)/N on the wire.
    """
    src, dst = src_dim % x.dim(), dst_dim % x.dim()
    if src == dst:
        return slice_invariant(all_gather_invariant(x, src, axis, src_segments), dst, axis, dst_segments)
    return _run(x, axis, _exchange, _exchange_back, src, dst, axis, src_segments, dst_segments)


def exchange_rows(x: Tensor, axis: Axis, receive: list[int], send: list[int]) -> Tensor:
    """Rows of dim 0 sent to, and received from, each coordinate in order. Backward: the reverse."""
    return _run(x, axis, exchanged, _exchange_rows_back, axis, receive, send)


def _exchange_rows_back(x: Tensor, axis: Axis, receive: list[int], send: list[int]) -> Tensor:
    return exchange_rows(x, axis, send, receive)


def _exchange_back(
    x: Tensor, src: int, dst: int, axis: Axis, src_segments: Segments | None, dst_segments: Segments | None
) -> Tensor:
    return all_to_all(x, dst, src, axis, dst_segments, src_segments)


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x


def _keep(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.coordinate == 0 else torch.zeros_like(x)


def _place(x: Tensor, dim: int, axis: Axis, segments: Segments | None) -> Tensor:
    check_local(x, dim, axis, segments)
    return place(x, dim, axis.coordinate, axis.size, segments)


def _take(x: Tensor, dim: int, axis: Axis, segments: Segments | None) -> Tensor:
    check_whole(x, dim, axis, segments)
    # A copy, where dim 0 is not the one cut: a view would keep the whole alive and be copied at each use.
    return take(x, dim, axis.coordinate, axis.size, segments).contiguous()


def _gather(x: Tensor, dim: int, axis: Axis, segments: Segments | None) -> Tensor:
    check_local(x, dim, axis, segments)
    if segments is None or is_even_run(segments):
        return unlead(gathered(x, axis), dim, axis.size)
    lengths = [local_length(segments, c) for c in range(axis.size)]
    padded = pad(x, dim, max(lengths))
    parts = gathered(padded, axis).view(axis.size, *padded.shape).unbind(0)
    return join([part.narrow(dim, 0, n) for part, n in zip(parts, lengths)], dim, segments)


def _scatter(x: Tensor, dim: int, axis: Axis, segments: Segments | None) -> Tensor:
    check_whole(x, dim, axis, segments)
    if segments is None or is_even_run(segments):
        return scattered(lead(x, dim, axis.size), axis)
    lengths = [local_length(segments, c) for c in range(axis.size)]
    parts = [pad(take(x, dim, c, axis.size, segments), dim, max(lengths)) for c in range(axis.size)]
    return scattered(torch.cat(parts), axis).narrow(dim, 0, lengths[axis.coordinate]).contiguous()


def _exchange(
    x: Tensor, src: int, dst: int, axis: Axis, src_segments: Segments | None, dst_segments: Segments | None
) -> Tensor:
    check_local(x, src, axis, src_segments)
    check_whole(x, dst, axis, dst_segments)
    if is_even_run(src_segments) and is_even_run(dst_segments):
        sent = lead(x, dst, axis.size)
        rows = [sent.shape[0] // axis.size] * axis.size
        return unlead(exchanged(sent, axis, rows, rows), src, axis.size)
    parts = [take(x, dst, c, axis.size, dst_segments) for c in range(axis.size)]
    lengths = [x.shape[src] if src_segments is None else local_length(src_segments, c) for c in range(axis.size)]
    mine = parts[axis.coordinate]
    shapes = [(*mine.shape[:src], n, *mine.shape[src + 1 :]) for n in lengths]
    receive, send = [math.prod(shape) for shape in shapes], [part.numel() for part in parts]
    flat = exchanged(torch.cat([part.reshape(-1) for part in parts]), axis, receive, send)
    received = [piece.view(shape) for piece, shape in zip(flat.split(receive), shapes)]
    return torch.cat(received, src) if src_segments is None else join(received, src, src_segments)
