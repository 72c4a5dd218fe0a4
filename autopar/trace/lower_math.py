"""Normal forms of arithmetic, reductions and norms."""

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.trace.affine import truth
from autopar.trace.builder import Builder, aten, broadcast, dims_of, dtype, lowering, positive, shape


def _sum_of(b: Builder, target: Any, x: fx.Node, y: Any, alpha: Any) -> fx.Node:
    """x ± alpha y; adding zero is nothing where the dtype stays.

    A number that is added to a single float becomes a tensor: a term of a sum (a loss of some rows) takes it once.
    """
    if isinstance(y, fx.Node):
        return b.emit(target, x, y if alpha == 1 else b.emit(aten.mul.Tensor, y, alpha))
    y = y * alpha if alpha != 1 else y
    floats = x.meta["spec"].is_float
    if y == 0 and dtype(x) != torch.bool and (type(y) is int or floats and type(y) is float):
        return x
    single = floats and not shape(x) and not isinstance(y, complex)
    return b.emit(target, x, b.full((), y, dtype(x)) if single else y)


@lowering(aten.add.Tensor, aten.add.Scalar)
def _plus(b: Builder, x: fx.Node, y: Any, alpha: Any = 1) -> fx.Node:
    return _sum_of(b, aten.add.Tensor, x, y, alpha)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def _minus(b: Builder, x: fx.Node, y: Any, alpha: Any = 1) -> fx.Node:
    return _sum_of(b, aten.sub.Tensor, x, y, alpha)


@lowering(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(b: Builder, x: fx.Node, y: Any, alpha: Any = 1) -> fx.Node:
    x = x if alpha == 1 else b.emit(aten.mul.Tensor, x, alpha)
    return b.emit(aten.sub.Tensor, y, x) if isinstance(y, fx.Node) else _plus(b, b.emit(aten.neg.default, x), y)


@lowering(aten.mul.Tensor, aten.mul.Scalar)
def mul(b: Builder, x: fx.Node, y: Any) -> fx.Node:
    """A product; times one is nothing where the dtype stays."""
    if not isinstance(y, fx.Node) and y == 1 and (type(y) is int or x.meta["spec"].is_float) and dtype(x) != torch.bool:
        return x
    return b.emit(aten.mul.Tensor, x, y)


@lowering(aten._conj.default)
def _conj(b: Builder, x: fx.Node) -> fx.Node:
    """Elements of their own: a collective would send what lies in memory."""
    return b.emit(aten.conj_physical.default, x)


@lowering(aten._neg_view.default)
def _neg_view(b: Builder, x: fx.Node) -> fx.Node:
    return b.emit(aten.neg.default, x)


@lowering(aten.diagonal_copy.default)
def _diagonal_copy(b: Builder, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> fx.Node:
    return b.emit(aten.diagonal.default, x, offset, dim1, dim2)


@lowering(aten.matmul.default)
def matmul(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """A product with a matrix that was transposed is a ``linear``."""
    if y.target is aten.permute.default and len(shape(y)) == 2 and b.here(y):
        return b.emit(aten.linear.default, x, y.args[0])
    return b.emit(aten.matmul.default, x, y)


@lowering(aten.div.Scalar)
def _div(b: Builder, x: fx.Node, y: Any) -> fx.Node:
    return b.emit(aten.div.Tensor, x, y)


def _both(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """x and y; where one is true everywhere it is the other."""
    for one, other in ((x, y), (y, x)):
        if dtype(one) == dtype(other) == torch.bool and truth(one):
            return b.expand(other, broadcast(shape(one), shape(other)))
    return b.emit(aten.bitwise_and.Tensor, x, y)


@lowering(aten.logical_and.default)
def _logical_and(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    return _both(b, x, y) if dtype(x) == dtype(y) == torch.bool else b.emit(aten.logical_and.default, x, y)


@lowering(aten.__and__.Tensor, aten.bitwise_and.Tensor)
def _and(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    return _both(b, x, y)


@lowering(aten.__or__.Tensor)
def _or(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    return b.emit(aten.bitwise_or.Tensor, x, y)


@lowering(aten.addcmul.default)
def _addcmul(b: Builder, x: fx.Node, y: fx.Node, z: fx.Node, *, value: Any = 1) -> fx.Node:
    return _plus(b, x, mul(b, b.emit(aten.mul.Tensor, y, z), value))


@lowering(aten.addcdiv.default)
def _addcdiv(b: Builder, x: fx.Node, y: fx.Node, z: fx.Node, *, value: Any = 1) -> fx.Node:
    return _plus(b, x, mul(b, b.emit(aten.div.Tensor, y, z), value))


@lowering(aten.baddbmm.default)
def baddbmm(b: Builder, x: fx.Node, y: fx.Node, z: fx.Node, *, beta: Any = 1, alpha: Any = 1) -> fx.Node:
    """beta x + alpha y z."""
    product = mul(b, b.emit(aten.bmm.default, y, z), alpha)
    return product if beta == 0 else _plus(b, mul(b, x, beta), product)


@lowering(aten.addbmm.default)
def _addbmm(b: Builder, x: fx.Node, y: fx.Node, z: fx.Node, *, beta: Any = 1, alpha: Any = 1) -> fx.Node:
    product = mul(b, total(b, b.emit(aten.bmm.default, y, z), [0]), alpha)
    return product if beta == 0 else _plus(b, mul(b, x, beta), product)


@lowering(aten.addmm.default)
def _addmm(b: Builder, x: fx.Node, y: fx.Node, z: fx.Node, *, beta: Any = 1, alpha: Any = 1) -> fx.Node:
    if beta == 1 and alpha == 1:
        return b.emit(aten.addmm.default, x, y, z)
    product = mul(b, b.emit(aten.mm.default, y, z), alpha)
    return product if beta == 0 else _plus(b, mul(b, x, beta), product)


@lowering(aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where_scalar(b: Builder, condition: fx.Node, x: Any, y: Any) -> fx.Node:
    return b.emit(aten.where.self, condition, *_numbers_to_tensors(b, x, y))


def _numbers_to_tensors(b: Builder, x: Any, y: Any) -> list[fx.Node]:
    """Numbers as 0-d tensors of the dtype that torch promotes the pair to."""
    stand = [torch.empty(shape(v), dtype=dtype(v), device="meta") if isinstance(v, fx.Node) else v for v in (x, y)]
    to = torch.result_type(*stand)
    return [v if isinstance(v, fx.Node) else b.full((), v, to) for v in (x, y)]


@lowering(aten.masked_fill.Tensor)
def _masked_fill(b: Builder, x: fx.Node, mask: fx.Node, value: fx.Node) -> fx.Node:
    wide = broadcast(shape(x), shape(mask))
    return b.expand(b.emit(aten.where.self, mask, b.cast(value, dtype(x)), x), wide)


@lowering(aten.mean.default, aten.mean.dim)
def mean(b: Builder, x: fx.Node, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **_: Any) -> fx.Node:
    """A mean over an explicit list of dims."""
    x = b.cast(x, dtype) if dtype is not None else x
    dims = dims_of(dim, len(shape(x)))
    return b.emit(aten.mean.dim, x, dims, keepdim) if shape(x) else x


@lowering(aten.sum.default, aten.sum.dim_IntList)
def total(b: Builder, x: fx.Node, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **_: Any) -> fx.Node:
    """A sum over an explicit list of dims."""
    x = b.cast(x, dtype) if dtype is not None else x
    return b.emit(aten.sum.dim_IntList, x, dims_of(dim, len(shape(x))), keepdim)


@lowering(aten.amax.default, aten.max.default)
def _largest(b: Builder, x: fx.Node, dim: Any = None, keepdim: bool = False) -> fx.Node:
    return b.emit(aten.amax.default, x, dims_of(dim, len(shape(x))), keepdim)


@lowering(aten.amin.default, aten.min.default)
def _smallest(b: Builder, x: fx.Node, dim: Any = None, keepdim: bool = False) -> fx.Node:
    return b.emit(aten.amin.default, x, dims_of(dim, len(shape(x))), keepdim)


@lowering(aten.aminmax.default)
def _aminmax(b: Builder, x: fx.Node, *, dim: Any = None, keepdim: bool = False) -> tuple[fx.Node, fx.Node]:
    return _smallest(b, x, dim, keepdim), _largest(b, x, dim, keepdim)


@lowering(aten.linalg_vector_norm.default)
def _vector_norm(
    b: Builder, x: fx.Node, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> fx.Node:
    x = b.cast(x, dtype) if dtype is not None else x
    return b.emit(aten.linalg_vector_norm.default, x, p, dims_of(dim, len(shape(x))), keepdim)


@lowering(aten.norm.Scalar, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def _norm(b: Builder, x: fx.Node, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> fx.Node:
    """The older name of the same."""
    return _vector_norm(b, x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def _bilinear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """x [n, i], w [o, i, j], y [n, j]: a product with w, then one with y in each row."""
    rows = (x @ w.transpose(0, 1).flatten(1)).unflatten(1, (w.shape[0], w.shape[2]))
    return (rows * y.unsqueeze(1)).sum(2)


@lowering(aten.bilinear.default)
def bilinear(b: Builder, x: fx.Node, y: fx.Node, w: fx.Node, bias: Any = None) -> fx.Node:
    """In products that rules know; torch's own is one op of many dims."""
    flat = [b.reshape(v, (prod(shape(v)[:-1]), shape(v)[-1])) for v in (x, y)]
    out = b.reshape(b.inline(_bilinear, flat[0], w, flat[1]), (*shape(x)[:-1], shape(w)[0]))
    return out if bias is None else _plus(b, out, bias)


def _variance(x: Tensor, dims: list[int], correction: float, keepdim: bool) -> Tensor:
    """Mean squared distance from the mean, times n / (n - correction)."""
    n = 1
    for d in dims:
        n *= x.shape[d]
    squares = (x - x.mean(dims, keepdim=True)).pow(2)
    return squares.mean(dims, keepdim=keepdim) * (n / (n - correction) if n != correction else float("inf"))


@lowering(aten.var.default, aten.var.dim, aten.var.correction)
def var(
    b: Builder, x: fx.Node, *args: Any, correction: Any = None, keepdim: bool = False, unbiased: bool = True
) -> fx.Node:
    """A variance, in means and squares. The positional forms are (unbiased) and (dim, unbiased, keepdim)."""
    dim, unbiased, keepdim = _var_args(args, unbiased, keepdim)
    correction = (1 if unbiased else 0) if correction is None else correction
    result: fx.Node = b.inline(_variance, x, dims_of(dim, len(shape(x))), correction, keepdim)
    return result


def _var_args(args: tuple[Any, ...], unbiased: bool, keepdim: bool) -> tuple[Any, bool, bool]:
    if args and isinstance(args[0], bool):
        return None, args[0], keepdim
    rest = (*args, *(None, unbiased, keepdim)[len(args) :])
    return rest[0], bool(rest[1]), bool(rest[2])


def _root(variance: Tensor) -> Tensor:
    """Its square root, whose gradient is 0 where it is 0 (``std_backward`` of FunctionsManual.cpp), not infinite."""
    flat = variance == 0
    return torch.where(flat, variance, torch.where(flat, torch.ones_like(variance), variance).sqrt())


@lowering(aten.std.default, aten.std.dim, aten.std.correction)
def _std(b: Builder, x: fx.Node, *args: Any, **kwargs: Any) -> Any:
    return b.inline(_root, var(b, x, *args, **kwargs))


@lowering(aten.var_mean.correction, aten.var_mean.dim, aten.var_mean.default)
def _var_mean(b: Builder, x: fx.Node, *args: Any, **kwargs: Any) -> tuple[fx.Node, fx.Node]:
    dim, _, keepdim = _var_args(args, True, kwargs.get("keepdim", False))
    return var(b, x, *args, **kwargs), mean(b, x, dim, keepdim)


@lowering(aten.std_mean.correction, aten.std_mean.dim, aten.std_mean.default)
def _std_mean(b: Builder, x: fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, fx.Node]:
    variance, middle = _var_mean(b, x, *args, **kwargs)
    return b.inline(_root, variance), middle


def _group_norm(x: Tensor, w: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    parts = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]).to(acc)
    dims = list(range(2, parts.ndim))
    centred = parts - parts.mean(dims, keepdim=True)
    y = (centred * torch.rsqrt(centred.pow(2).mean(dims, keepdim=True) + eps)).reshape(x.shape)
    return _affine(y, w, bias).to(x.dtype)


def _affine(y: Tensor, w: Tensor | None, bias: Tensor | None) -> Tensor:
    """y w + bias, where w and bias belong to dim 1."""
    over = [1, -1] + [1] * (y.ndim - 2)
    y = y * w.reshape(over) if w is not None else y
    return y + bias.reshape(over) if bias is not None else y


@lowering(aten.group_norm.default)
def group_norm(b: Builder, x: fx.Node, groups: int, w: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """In reshapes, means and squares, so that groups are a factor of the channels."""
    return b.inline(_group_norm, x, w, bias, groups, eps)


def _batch_norm_train(
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Statistics of the batch, and the running ones moved towards them (with the unbiased variance)."""
    acc = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(acc)
    dims = [d for d in range(x.ndim) if d != 1]
    n = x.numel() // x.shape[1]
    middle = wide.mean(dims, keepdim=True)
    centred = wide - middle
    spread = centred.pow(2).mean(dims, keepdim=True)
    y = _affine(centred * torch.rsqrt(spread + eps), w, bias).to(x.dtype)
    if mean is None or var is None:
        return y, None, None
    new_mean = mean * (1 - momentum) + middle.reshape(-1).detach().to(mean.dtype) * momentum
    new_var = var * (1 - momentum) + spread.reshape(-1).detach().to(var.dtype) * (
        momentum * (n / (n - 1) if n > 1 else float("nan"))
    )
    return y, new_mean, new_var


def _batch_norm_eval(x: Tensor, w: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    over = [1, -1] + [1] * (x.ndim - 2)
    y = (x - mean.reshape(over)) * torch.rsqrt(var + eps).reshape(over)
    return _affine(y, w, bias).to(x.dtype)


@lowering(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    b: Builder, x: fx.Node, w: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    """(y, -, -, new running mean, new running variance)."""
    if not training:
        return b.inline(_batch_norm_eval, x, w, bias, mean, var, eps), None, None, mean, var
    y, new_mean, new_var = b.inline(_batch_norm_train, x, w, bias, mean, var, momentum, eps)
    return y, None, None, new_mean, new_var


@lowering(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(b: Builder, x: fx.Node, w: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    return b.inline(_batch_norm_train, x, w, bias, None, None, momentum, eps)[0], None, None


@lowering(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_fixed(
    b: Builder, x: fx.Node, w: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    return b.inline(_batch_norm_eval, x, w, bias, mean, var, eps), None, None


@lowering(aten.native_batch_norm.default)
def _native_batch_norm(b: Builder, x: fx.Node, w: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    return batch_norm(b, x, w, bias, mean, var, *rest), None, None


@lowering(aten.instance_norm.default)
def _instance_norm(
    b: Builder, x: fx.Node, w: Any, bias: Any, mean: Any, var: Any, of_input: bool, momentum: float, eps: float, *_: Any
) -> Any:
    """Statistics of each row and channel, or the running ones, which the op moves in place."""
    if not of_input:
        return b.inline(_batch_norm_eval, x, w, bias, mean, var, eps)
    if mean is not None:
        where = b.like.meta if b.like is not None else {}
        raise AutoparError(
            "unsupported-op",
            f"{where.get('module') or 'the model'}: {where.get('source')}: instance_norm trains running statistics",
            "build it with track_running_stats=False, or call eval() on the layer",
        )
    return b.inline(_group_norm, x, w, bias, shape(x)[1], eps)


@lowering(aten.batch_norm.default)
def batch_norm(b: Builder, x: fx.Node, w: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
    """Without running statistics, or in eval; the training form with statistics is functional by now."""
    if training:
        assert mean is None, "batch_norm with running statistics was not made functional"
        return b.inline(_batch_norm_train, x, w, bias, None, None, *rest[:2])[0]
    return b.inline(_batch_norm_eval, x, w, bias, mean, var, rest[1])


@lowering(aten.glu.default)
def _glu(b: Builder, x: fx.Node, dim: int = -1) -> fx.Node:
    """Two halves, so that each may be sharded by itself."""
    value, gate = b.apply(aten.split.Tensor, x, shape(x)[dim] // 2, dim)
    return b.emit(aten.mul.Tensor, value, b.emit(aten.sigmoid.default, gate))


@lowering(aten.softmax.int, aten._softmax.default)
def _softmax(b: Builder, x: fx.Node, dim: int, to: Any = None) -> fx.Node:
    return _soft(b, aten.softmax.int, x, dim, to)


@lowering(aten.log_softmax.int, aten._log_softmax.default)
def _log_softmax(b: Builder, x: fx.Node, dim: int, to: Any = None) -> fx.Node:
    return _soft(b, aten.log_softmax.int, x, dim, to)


def _soft(b: Builder, target: Any, x: fx.Node, dim: int, to: Any) -> fx.Node:
    x = b.cast(x, to) if isinstance(to, torch.dtype) else x
    return b.emit(target, x, positive(dim, len(shape(x))), spec=x.meta["spec"])
