"""Normal forms of what draws random numbers: masks of dropout, and numbers between 0 and 1 or normal ones."""

from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir import ops
from autopar.trace.builder import Builder, aten, dtype, lowering, shape


@lowering(aten.dropout.default)
def _dropout(b: Builder, x: fx.Node, p: float, train: bool) -> fx.Node:
    if not train or p == 0:
        return x
    return b.emit(ops.dropout, x, float(p), b.key(), spec=x.meta["spec"])


@lowering(aten.native_dropout.default)
def _native_dropout(b: Builder, x: fx.Node, p: float, train: bool | None) -> tuple[fx.Node, None]:
    return _dropout(b, x, p, train is not False), None


@lowering(aten.bernoulli.p)
def bernoulli(b: Builder, x: fx.Node, p: float, **_: Any) -> fx.Node:
    """Ones at probability p: where a dropout of ones leaves something."""
    left = b.emit(ops.dropout, b.full(shape(x), 1, dtype(x)), 1 - float(p), b.key(), spec=x.meta["spec"])
    return b.cast(b.emit(aten.ne.Scalar, left, 0), dtype(x))


@lowering(aten.feature_dropout.default)
def feature_dropout(b: Builder, x: fx.Node, p: float, train: bool) -> fx.Node:
    """Whole channels at once: a dropped-out mask of ones, multiplied in."""
    if not train or p == 0:
        return x
    ones = b.full((*shape(x)[:2], *(1 for _ in shape(x)[2:])), 1, dtype(x))
    return b.emit(aten.mul.Tensor, x, _dropout(b, ones, p, train))


def _drawn(b: Builder, to: Any, kind: str, dtype: Any = None) -> fx.Node:
    """Random numbers of shape ``to``; each rank draws those of the part that it needs."""
    return b.emit(ops.draw, b.full(to, 0, dtype or torch.get_default_dtype()), kind, b.key())


@lowering(aten.rand.default)
def _rand(b: Builder, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return _drawn(b, to, "uniform", dtype)


@lowering(aten.randn.default)
def _randn(b: Builder, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return _drawn(b, to, "normal", dtype)


@lowering(aten.rand_like.default)
def _rand_like(b: Builder, x: fx.Node, *, dtype: Any = None, **_: Any) -> fx.Node:
    return _drawn(b, shape(x), "uniform", dtype or x.meta["spec"].dtype)


@lowering(aten.randn_like.default)
def _randn_like(b: Builder, x: fx.Node, *, dtype: Any = None, **_: Any) -> fx.Node:
    return _drawn(b, shape(x), "normal", dtype or x.meta["spec"].dtype)


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return u * (high - low) + low


@lowering(aten.uniform.default)
def _uniform(b: Builder, x: fx.Node, low: float = 0.0, high: float = 1.0, **_: Any) -> Any:
    return b.inline(_between, _drawn(b, shape(x), "uniform", dtype(x)), low, high)


def _scaled(z: Tensor, mean: Any, std: Any) -> Tensor:
    return z * std + mean


@lowering(aten.normal_functional.default)
def _normal_like(b: Builder, x: fx.Node, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
    return b.inline(_scaled, _drawn(b, shape(x), "normal", dtype(x)), mean, std)


@lowering(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def _normal(b: Builder, mean: Any, std: Any = 1.0, **_: Any) -> Any:
    """Without a gradient to its mean and deviation, as torch's own."""
    given = [v for v in (mean, std) if isinstance(v, fx.Node)]
    to = torch.broadcast_shapes(*(shape(v) for v in given))
    mean, std = (b.emit(aten.detach.default, v) if isinstance(v, fx.Node) else v for v in (mean, std))
    return b.inline(_scaled, _drawn(b, to, "normal", dtype(given[0])), mean, std)


@lowering(aten.normal.float_float)
def _normal_of(b: Builder, mean: float, std: float, to: Any, *, dtype: Any = None, **_: Any) -> Any:
    return b.inline(_scaled, _drawn(b, to, "normal", dtype), mean, std)


def _fine(kind: torch.dtype) -> torch.dtype:
    """A dtype with the digits that a small probability or a logarithm needs of uniform numbers."""
    return torch.promote_types(kind, torch.float32)


@lowering(aten.exponential.default)
def _exponential(b: Builder, x: fx.Node, rate: float = 1.0, **_: Any) -> Any:
    """Never 0, of which a logarithm is taken: at least half an epsilon, as ATen/core/TransformationHelper.h has it."""
    kind = _fine(dtype(x))
    least = torch.finfo(kind).eps / 2
    u = _drawn(b, shape(x), "uniform", kind)
    return b.cast(b.inline(lambda u: (-torch.log1p(-u)).clamp(min=least) / rate, u), dtype(x))


@lowering(aten.bernoulli.default)
def _bernoulli_of(b: Builder, p: fx.Node, **_: Any) -> Any:
    return _bernoulli_like(b, p, p)


@lowering(aten.bernoulli.Tensor)
def _bernoulli_like(b: Builder, x: fx.Node, p: fx.Node, **_: Any) -> Any:
    kind = _fine(dtype(p))
    u = _drawn(b, shape(x), "uniform", kind)
    return b.cast(b.emit(aten.lt.Tensor, u, b.cast(p, kind)), dtype(x))


def _integers(b: Builder, to: Any, low: int, high: int, kind: Any) -> fx.Node:
    """Whole numbers from ``low`` to ``high`` - 1."""
    u = _drawn(b, to, "uniform", torch.float64)
    return b.cast(b.inline(lambda u: torch.floor(u * (high - low)) + low, u), kind)


@lowering(aten.randint.default)
def _randint(b: Builder, high: int, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return _integers(b, to, 0, high, dtype or torch.int64)


@lowering(aten.randint.low)
def _randint_from(b: Builder, low: int, high: int, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return _integers(b, to, low, high, dtype or torch.int64)


@lowering(aten.randint_like.default)
def _randint_like(b: Builder, x: fx.Node, high: int, *, dtype: Any = None, **_: Any) -> fx.Node:
    return _integers(b, shape(x), 0, high, dtype or x.meta["spec"].dtype)


@lowering(aten.randint_like.low_dtype)
def _randint_like_from(b: Builder, x: fx.Node, low: int, high: int, *, dtype: Any = None, **_: Any) -> fx.Node:
    return _integers(b, shape(x), low, high, dtype or x.meta["spec"].dtype)


@lowering(aten.randperm.default)
def _randperm(b: Builder, n: int, *, dtype: Any = None, **_: Any) -> fx.Node:
    """The order of random numbers."""
    order = b.inline(lambda u: u.argsort(0), _drawn(b, (n,), "uniform", torch.float64))
    return b.cast(order, dtype or torch.int64)


def _choices(p: Tensor, u: Tensor, count: int, replacement: bool) -> Tensor:
    """The largest of log p + Gumbel noise is drawn with probability p; the largest few are draws without return."""
    logs = torch.log(p.to(u.dtype))
    noisy = (logs.unsqueeze(-2) if replacement else logs) - torch.log(-torch.log1p(-u))
    return noisy.argmax(-1) if replacement else noisy.topk(count, -1).indices


@lowering(aten.multinomial.default)
def _multinomial(b: Builder, p: fx.Node, count: int, replacement: bool = False, **_: Any) -> Any:
    to = (*shape(p)[:-1], count, shape(p)[-1]) if replacement else shape(p)
    return b.inline(_choices, p, _drawn(b, to, "uniform", torch.float64), count, replacement)
