"""Largest and smallest elements, softmax and log-sum-exp along dims that several ranks share out.

No rank gathers the dim: maxima, sums and indices of what is left of a tensor without it cross the wire, in the
accumulation dtype (float32 for half precision, int64 for integers). Results and gradients are those of torch's ops on
the whole, NaN and infinities included.

Common arguments:

    x        this rank's part, S on ``axes`` along ``dim`` or ``dims``; it may have none of a dim's elements
    axes     the mesh axes that share the dims out
"""

from typing import Any

import torch
from torch import Tensor

from autopar.runtime._functional import reduced
from autopar.runtime.axis import Axis
from autopar.runtime.loss import accumulation
from autopar.runtime.shards import Runs, local_index

Axes = tuple[Axis, ...]


def extreme(x: Tensor, dims: tuple[int, ...], keepdim: bool, way: str, axes: Axes) -> Tensor:
    """``x.amax`` or ``x.amin`` ("max", "min") over ``dims`` of the whole, I on ``axes``.

    Two all-reduces, of the results and of how many elements are equal to each: those share its gradient evenly.
    """
    out: Tensor = _Extreme.apply(x, dims, way, axes)
    return out if keepdim else out.squeeze(dims)


def extreme_at(
    x: Tensor, dim: int, keepdim: bool, way: str, axes: Axes, runs: Runs, total: int
) -> tuple[Tensor, Tensor]:
    """``x.max(dim)`` or ``x.min(dim)`` of the whole: values and the first indices that have them, I on ``axes``.

    Two all-reduces, of the results and of their indices. The gradient goes to that index alone.

    Args:
        runs: what this rank holds of the dim, in local order. total: its length.
    """
    values, where = _ExtremeAt.apply(x, dim, way, axes, runs, total)
    return (values, where) if keepdim else (values.squeeze(dim), where.squeeze(dim))


def logsumexp(x: Tensor, dims: tuple[int, ...], keepdim: bool, axes: Axes) -> Tensor:
    """``x.logsumexp(dims)`` of the whole, I on ``axes``. Two all-reduces, of maxima and of sums."""
    out: Tensor = _LogSumExp.apply(x, dims, axes)
    return out if keepdim else out.squeeze(dims)


def softmax(x: Tensor, dim: int, axes: Axes) -> Tensor:
    """This rank's part of ``x.softmax(dim)``. All-reduces of maxima and of sums, and of one sum in the backward."""
    out: Tensor = _Softmax.apply(x, dim, axes)
    return out


def log_softmax(x: Tensor, dim: int, axes: Axes) -> Tensor:
    """This rank's part of ``x.log_softmax(dim)``. All-reduces as of ``softmax``."""
    out: Tensor = _LogSoftmax.apply(x, dim, axes)
    return out


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], way: str, axes: Axes) -> Tensor:
        wide = _wide(x)
        mine = _local(wide, dims, way)
        best = _over(_finite(mine, way), axes, way)
        if x.is_floating_point():  # a maximum over ranks may lose a NaN, a sum does not
            ties = (wide == best).sum(dims, keepdim=True, dtype=best.dtype).masked_fill(mine.isnan(), torch.nan)
            ties = _over(ties, axes, "sum")
            best = best.masked_fill(ties.isnan(), torch.nan)
            ctx.save_for_backward(x, best, ties)
        return best.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, best, ties = ctx.saved_tensors
        return ((x == best) * (grad / ties)).to(x.dtype), None, None, None


class _ExtremeAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, way: str, axes: Axes, runs: Runs, total: int) -> tuple[Tensor, Tensor]:
        wide = _wide(x)
        mine = _local(wide, (dim,), way)
        best = _over(_finite(mine, way), axes, way)
        where = torch.full_like(mine, total, dtype=torch.int64)  # behind every index: this rank has no such element
        if x.shape[dim]:
            held = torch.cat([torch.arange(start, start + n, device=x.device) for start, n in runs])
            first = held[wide.max(dim, True).indices if way == "max" else wide.min(dim, True).indices]
            where = torch.where(mine == best, first, where)
            where = torch.where(mine.isnan(), first - total, where)  # before every index: a NaN, the first of all
        where = _over(where, axes, "min")
        values = best.masked_fill(where < 0, torch.nan) if x.is_floating_point() else best
        where = where.remainder(total)
        ctx.save_for_backward(where)
        ctx.mark_non_differentiable(where)
        ctx.dim, ctx.runs, ctx.shape = dim, runs, x.shape
        return values.to(x.dtype), where

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (where,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.shape)
        if ctx.shape[ctx.dim]:
            index, inside = local_index(where, ctx.runs)
            out = out.scatter(ctx.dim, index, grad.masked_fill(~inside, 0.0))
        return out, None, None, None, None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], axes: Axes) -> Tensor:
        wide = _wide(x)
        top = _top(wide, dims, axes)
        top = top.masked_fill(top.isinf(), 0.0)  # as torch: the result is that infinity
        out = _over((wide - top).exp().sum(dims, keepdim=True), axes, "sum").log() + top
        ctx.save_for_backward(x, out)
        return out.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out = ctx.saved_tensors
        return (grad * (x - out).exp()).to(x.dtype), None, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axes: Axes) -> Tensor:
        wide = _wide(x)
        parts = (wide - _top(wide, (dim,), axes)).exp()
        out = (parts / _over(parts.sum(dim, keepdim=True), axes, "sum")).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.dim, ctx.axes = dim, axes
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        wide = _wide(grad)
        mean = _over((wide * out).sum(ctx.dim, keepdim=True), ctx.axes, "sum")
        return (out * (wide - mean)).to(grad.dtype), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axes: Axes) -> Tensor:
        wide = _wide(x)
        wide = wide - _top(wide, (dim,), axes)
        out = (wide - _over(wide.exp().sum(dim, keepdim=True), axes, "sum").log()).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.dim, ctx.axes = dim, axes
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        wide = _wide(grad)
        total = _over(wide.sum(ctx.dim, keepdim=True), ctx.axes, "sum")
        return (wide - out.to(wide.dtype).exp() * total).to(grad.dtype), None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation(x.dtype) if x.is_floating_point() else torch.int64)


def _lowest(dtype: torch.dtype, way: str) -> float | int:
    """What any element beats."""
    if dtype.is_floating_point:
        return -torch.inf if way == "max" else torch.inf
    return torch.iinfo(dtype).min if way == "max" else torch.iinfo(dtype).max


def _local(x: Tensor, dims: tuple[int, ...], way: str) -> Tensor:
    """The best of what this rank holds, its dims kept; where it holds nothing, what any element beats."""
    if all(x.shape[d] for d in dims):
        return x.amax(dims, keepdim=True) if way == "max" else x.amin(dims, keepdim=True)
    return x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], _lowest(x.dtype, way))


def _finite(mine: Tensor, way: str) -> Tensor:
    """Without NaN, of which backends keep one or lose it."""
    return mine.masked_fill(mine.isnan(), _lowest(mine.dtype, way)) if mine.is_floating_point() else mine


def _top(wide: Tensor, dims: tuple[int, ...], axes: Axes) -> Tensor:
    """Maxima to subtract, the same on every rank; a NaN comes back with the sum."""
    return _over(_finite(_local(wide, dims, "max"), "max"), axes, "max")


def _over(x: Tensor, axes: Axes, way: str) -> Tensor:
    for axis in axes:
        x = reduced(x, axis, way) if axis.size > 1 else x
    return x
