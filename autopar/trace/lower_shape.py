"""Normal forms of what moves or makes elements without arithmetic: views, cuts, joins, constants, casts."""

import math
import operator
from typing import Any

import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.ir.program import Spec
from autopar.trace.builder import Builder, aten, broadcast, dtype, lowering, positive, shape
from autopar.trace.places import said

END = 2**62  # a slice's end from here on means "to the end"


@lowering(
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
def same(_: Builder, x: fx.Node, *__: Any, **___: Any) -> fx.Node:
    """Copies and aliases are the value itself in a functional graph."""
    return x


@lowering(aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout)
def to_copy(b: Builder, x: fx.Node, kind: Any = None, *_: Any, dtype: Any = None, **__: Any) -> fx.Node:
    """A cast; a change of device only is nothing."""
    to = dtype if dtype is not None else kind
    return b.cast(x, to) if isinstance(to, torch.dtype) else x


@lowering(aten.copy.default)
def copy(b: Builder, dst: fx.Node, src: fx.Node, *_: Any) -> fx.Node:
    """The source, as the destination's dtype and shape."""
    return b.expand(b.cast(src, dtype(dst)), shape(dst))


@lowering(aten.fill.Scalar)
def _fill_scalar(b: Builder, x: fx.Node, value: Any) -> fx.Node:
    return b.full(shape(x), value, dtype(x))


@lowering(aten.fill.Tensor)
def _fill_tensor(b: Builder, x: fx.Node, value: fx.Node) -> fx.Node:
    return b.expand(b.cast(value, dtype(x)), shape(x))


def solved(to: Any, total: int) -> list[int]:
    """Sizes with -1 worked out."""
    known = math.prod(n for n in to if n != -1)
    return [total // max(known, 1) if n == -1 else int(n) for n in to]


@lowering(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_copy.default)
def _view(b: Builder, x: fx.Node, to: Any) -> fx.Node:
    return b.reshape(x, solved(to, math.prod(shape(x))))


@lowering(aten.flatten.using_ints)
def _flatten(b: Builder, x: fx.Node, start: int = 0, end: int = -1) -> fx.Node:
    s = shape(x) or (1,)
    lo, hi = positive(start, len(s)), positive(end, len(s))
    return b.reshape(x, (*s[:lo], math.prod(s[lo : hi + 1]), *s[hi + 1 :]))


@lowering(aten.unflatten.int)
def _unflatten(b: Builder, x: fx.Node, dim: int, sizes: Any) -> fx.Node:
    s, d = shape(x), positive(dim, len(shape(x)))
    return b.reshape(x, (*s[:d], *solved(sizes, s[d]), *s[d + 1 :]))


@lowering(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(b: Builder, x: fx.Node, dim: Any = None) -> fx.Node:
    s = shape(x)
    dims = range(len(s)) if dim is None else [positive(d, len(s)) for d in ([dim] if isinstance(dim, int) else dim)]
    return b.reshape(x, [n for d, n in enumerate(s) if n != 1 or d not in dims])


@lowering(aten.unsqueeze.default)
def _unsqueeze(b: Builder, x: fx.Node, dim: int) -> fx.Node:
    s = shape(x)
    d = positive(dim, len(s) + 1)
    return b.emit(aten.unsqueeze.default, x, d, spec=Spec((*s[:d], 1, *s[d:]), dtype(x)))


@lowering(aten.expand.default, aten.broadcast_to.default)
def _expand(b: Builder, x: fx.Node, to: Any, **_: Any) -> fx.Node:
    pad = len(to) - len(shape(x))
    return b.expand(x, [shape(x)[i - pad] if n == -1 else n for i, n in enumerate(to)])


@lowering(aten.expand_as.default)
def _expand_as(b: Builder, x: fx.Node, other: fx.Node) -> fx.Node:
    return b.expand(x, shape(other))


@lowering(aten.view_as.default, aten.reshape_as.default)
def _view_as(b: Builder, x: fx.Node, other: fx.Node) -> fx.Node:
    return b.reshape(x, shape(other))


@lowering(aten.broadcast_tensors.default)
def _broadcast_tensors(b: Builder, xs: list[fx.Node]) -> list[fx.Node]:
    to = broadcast(*(shape(x) for x in xs))
    return [b.expand(x, to) for x in xs]


@lowering(aten.permute.default)
def _permute(b: Builder, x: fx.Node, dims: list[int]) -> fx.Node:
    return b.permute(x, [positive(d, len(dims)) for d in dims])


@lowering(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def _transpose(b: Builder, x: fx.Node, first: int, second: int) -> fx.Node:
    dims = list(range(len(shape(x))))
    if dims:
        i, j = positive(first, len(dims)), positive(second, len(dims))
        dims[i], dims[j] = dims[j], dims[i]
    return b.permute(x, dims)


@lowering(aten.t.default, aten.mT.default, aten.numpy_T.default)
def _turn(b: Builder, x: fx.Node) -> fx.Node:
    return _transpose(b, x, -1, -2) if len(shape(x)) > 1 else x


@lowering(aten.select.int)
def _select(b: Builder, x: fx.Node, dim: int, index: int) -> fx.Node:
    s, d = shape(x), positive(dim, len(shape(x)))
    i = positive(index, s[d])
    return b.emit(aten.select.int, x, d, i, spec=Spec((*s[:d], *s[d + 1 :]), dtype(x)))


@lowering(aten.unbind.int)
def _unbind(b: Builder, x: fx.Node, dim: int = 0) -> list[fx.Node]:
    return [_select(b, x, dim, i) for i in range(shape(x)[dim])]


def bounds(start: int | None, end: int | None, n: int) -> tuple[int, int]:
    """start and end of a slice of a dim of size n, clamped to it."""
    lo, hi, _ = slice(start, None if end is None or end >= END else end).indices(n)
    return lo, max(lo, hi)


@lowering(aten.slice.Tensor)
def _slice(b: Builder, x: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> fx.Node:
    s, d = shape(x), positive(dim, len(shape(x)))
    lo, hi = bounds(start, end, s[d])
    if step == 1:
        return b.cut(x, d, lo, hi)
    return b.emit(aten.slice.Tensor, x, d, lo, hi, step)


@lowering(aten.narrow.default)
def _narrow(b: Builder, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    d = positive(dim, len(shape(x)))
    start = positive(start, shape(x)[d]) if start < 0 else start
    return b.cut(x, d, start, start + length)


@lowering(aten.slice_scatter.default)
def _slice_scatter(
    b: Builder, x: fx.Node, src: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    s, d = shape(x), positive(dim, len(shape(x)))
    lo, hi = bounds(start, end, s[d])
    if step != 1:
        return b.emit(aten.slice_scatter.default, x, src, d, lo, hi, step)
    around = [(0, lo), (hi, s[d])]
    before, after = ([b.cut(x, d, i, j)] if j > i else [] for i, j in around)
    return b.cat([*before, b.cast(src, dtype(x)), *after], d) if hi > lo else x


@lowering(aten.select_scatter.default)
def _select_scatter(b: Builder, x: fx.Node, src: fx.Node, dim: int, index: int) -> Any:
    d = positive(dim, len(shape(x)))
    i = positive(index, shape(x)[d])
    return _slice_scatter(b, x, _unsqueeze(b, src, d), d, i, i + 1)


@lowering(aten.unfold.default)
def _unfold(b: Builder, x: fx.Node, dim: int, size: int, step: int) -> fx.Node:
    """Windows side by side are a view."""
    s, d = shape(x), positive(dim, len(shape(x)))
    if not s or size != step or s[d] % size:
        return b.emit(aten.unfold.default, x, d, size, step)
    apart = b.reshape(x, (*s[:d], s[d] // size, size, *s[d + 1 :]))
    return b.permute(apart, [*range(d + 1), *range(d + 2, len(s) + 1), d + 1])


def _row_major(s: tuple[int, ...]) -> list[int]:
    return [math.prod(s[i + 1 :]) for i in range(len(s))]


def _strided(b: Builder, x: fx.Node, size: Any, stride: Any, offset: Any) -> tuple[int, fx.Node]:
    """(how many dims in front stay as they are, places in the others flattened), in row-major order."""
    s, size, stride, offset = shape(x), list(size), list(stride), offset or 0
    first = b.like.args[0] if b.like is not None and b.like.args else None
    val = first.meta.get("val") if isinstance(first, fx.Node) else None
    own = _row_major(s)
    ahead = 0
    while offset == 0 and ahead < min(len(size), len(s)) - 1 and (size[ahead], stride[ahead]) == (s[ahead], own[ahead]):
        ahead += 1
    reach = offset + sum((n - 1) * step for n, step in zip(size[ahead:], stride[ahead:]))
    if (isinstance(val, torch.Tensor) and not val.is_contiguous()) or reach >= math.prod(s[ahead:]):
        where = said(b.like.meta if b.like is not None else {})
        raise AutoparError(
            "unsupported-op", f"{where}: as_strided (or fill_diagonal_) of a view that is not contiguous",
            "call contiguous() first, or use unfold, diagonal or indexing",
        )  # fmt: skip

    def places() -> torch.Tensor:
        at = torch.full((), offset)
        for n, step in zip(size[ahead:], stride[ahead:]):
            at = at.unsqueeze(-1) + torch.arange(n) * step
        return at

    return ahead, b.inline(places)


@lowering(aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(b: Builder, x: fx.Node, size: Any, stride: Any, offset: Any = None) -> fx.Node:
    """An index into the flat dims: strides do not outlive the trace."""
    s = shape(x)
    if (tuple(size), list(stride), offset or 0) == (s, _row_major(s), 0):
        return x
    ahead, at = _strided(b, x, size, stride, offset)
    flat = b.reshape(x, (*s[:ahead], math.prod(s[ahead:])))
    taken: fx.Node = b.apply(aten.index.Tensor, flat, [*(None for _ in range(ahead)), at])
    return taken


@lowering(aten.as_strided_scatter.default)
def _as_strided_scatter(b: Builder, x: fx.Node, src: fx.Node, size: Any, stride: Any, offset: Any = None) -> fx.Node:
    """A scatter into the flat dims (torch's own derivative of the op is wrong where strides skip elements)."""
    s = shape(x)
    ahead, at = _strided(b, x, size, stride, offset)
    lead, count = s[:ahead], math.prod(shape(at))
    flat = b.reshape(x, (*lead, math.prod(s[ahead:])))
    index = b.expand(b.reshape(at, (*(1 for _ in lead), count)), (*lead, count))
    put = b.emit(aten.scatter.src, flat, ahead, index, b.reshape(b.cast(src, dtype(x)), (*lead, count)))
    return b.reshape(put, s)


@lowering(aten.cat.default)
def _cat(b: Builder, xs: list[fx.Node], dim: int = 0) -> fx.Node:
    xs = [x for x in xs if shape(x) != (0,)] or xs[:1]  # torch lets a [0] join anything
    to = xs[0].meta["spec"].dtype
    for x in xs:
        to = torch.promote_types(to, dtype(x))
    return b.cat([b.cast(x, to) for x in xs], positive(dim, len(shape(xs[0]))))


@lowering(aten.constant_pad_nd.default)
def constant_pad(b: Builder, x: fx.Node, pad: list[int], value: Any = 0) -> fx.Node:
    """Constants joined on; a negative pad cuts."""
    for i in range(len(pad) // 2):
        d = len(shape(x)) - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        x = b.cut(x, d, max(-before, 0), shape(x)[d] - max(-after, 0))
        fill = [(*shape(x)[:d], n, *shape(x)[d + 1 :]) for n in (max(before, 0), max(after, 0))]
        kind = dtype(x)
        value = int(value) if not x.meta["spec"].is_float else value
        ends = [[b.full(to, value, kind)] if to[d] else [] for to in fill]
        x = b.cat([*ends[0], x, *ends[1]], d)
    return x


@lowering(aten.stack.default)
def _stack(b: Builder, xs: list[fx.Node], dim: int = 0) -> fx.Node:
    d = positive(dim, len(shape(xs[0])) + 1)
    return _cat(b, [_unsqueeze(b, x, d) for x in xs], d)


def parted(b: Builder, x: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
    """``x`` in parts of ``sizes`` along ``dim``."""
    d = positive(dim, len(shape(x)))
    if len(sizes) == 1:
        return [x]
    s = shape(x)
    specs = tuple(Spec((*s[:d], n, *s[d + 1 :]), dtype(x)) for n in sizes)
    whole = b.emit(aten.split_with_sizes.default, x, list(sizes), d, spec=specs)
    return [b.apply(operator.getitem, whole, i) for i in range(len(sizes))]


@lowering(aten.split_with_sizes.default, aten.split.sizes, aten.unsafe_split_with_sizes.default)
def _split_with_sizes(b: Builder, x: fx.Node, sizes: list[int], dim: int = 0) -> list[fx.Node]:
    return parted(b, x, sizes, dim)


@lowering(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(b: Builder, x: fx.Node, size: int, dim: int = 0) -> list[fx.Node]:
    n = shape(x)[dim]
    return parted(b, x, [min(size, n - i) for i in range(0, n, size)] or [0], dim)


@lowering(aten.chunk.default, aten.unsafe_chunk.default)
def _chunk(b: Builder, x: fx.Node, chunks: int, dim: int = 0) -> list[fx.Node]:
    return _split(b, x, max(-(-shape(x)[dim] // chunks), 1), dim)


@lowering(aten.repeat.default)
def _repeat(b: Builder, x: fx.Node, times: list[int]) -> fx.Node:
    s = (1,) * (len(times) - len(shape(x))) + shape(x)
    apart = b.reshape(x, [k for n, t in zip(s, times) for k in ((1, n) if t > 1 else (n,))])
    wide = b.expand(apart, [k for n, t in zip(s, times) for k in ((t, n) if t > 1 else (n,))])
    return b.reshape(wide, [n * t for n, t in zip(s, times)])


@lowering(aten.repeat_interleave.self_int)
def _repeat_interleave(b: Builder, x: fx.Node, times: int, dim: int | None = None, **_: Any) -> fx.Node:
    if dim is None:
        x, dim = b.reshape(x, [math.prod(shape(x))]), 0
    s, d = shape(x), positive(dim, len(shape(x)))
    wide = b.expand(_unsqueeze(b, x, d + 1), (*s[: d + 1], times, *s[d + 1 :]))
    return b.reshape(wide, (*s[:d], s[d] * times, *s[d + 1 :]))
