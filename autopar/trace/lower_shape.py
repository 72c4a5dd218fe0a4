"""Normal forms of what moves or makes elements without arithmetic: views, cuts, joins, constants, casts."""

import math
import operator
from typing import Any

import torch
from torch import fx

from autopar.ir.program import Spec
from autopar.trace.affine import affine
from autopar.trace.builder import Builder, aten, dtype, lowering, positive, shape

END = 2**62  # a slice's end from here on means "to the end"


@lowering(
    aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh.default, aten.lift_fresh_copy.default
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
def fill_scalar(b: Builder, x: fx.Node, value: Any) -> fx.Node:
    return b.full(shape(x), value, dtype(x))


@lowering(aten.fill.Tensor)
def fill_tensor(b: Builder, x: fx.Node, value: fx.Node) -> fx.Node:
    return b.expand(b.cast(value, dtype(x)), shape(x))


def solved(to: Any, total: int) -> list[int]:
    """Sizes with -1 worked out."""
    known = math.prod(n for n in to if n != -1)
    return [total // max(known, 1) if n == -1 else int(n) for n in to]


@lowering(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_copy.default)
def view(b: Builder, x: fx.Node, to: Any) -> fx.Node:
    return b.reshape(x, solved(to, math.prod(shape(x))))


@lowering(aten.flatten.using_ints)
def flatten(b: Builder, x: fx.Node, start: int = 0, end: int = -1) -> fx.Node:
    s = shape(x) or (1,)
    lo, hi = positive(start, len(s)), positive(end, len(s))
    return b.reshape(x, (*s[:lo], math.prod(s[lo : hi + 1]), *s[hi + 1 :]))


@lowering(aten.unflatten.int)
def unflatten(b: Builder, x: fx.Node, dim: int, sizes: Any) -> fx.Node:
    s, d = shape(x), positive(dim, len(shape(x)))
    return b.reshape(x, (*s[:d], *solved(sizes, s[d]), *s[d + 1 :]))


@lowering(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(b: Builder, x: fx.Node, dim: Any = None) -> fx.Node:
    s = shape(x)
    dims = range(len(s)) if dim is None else [positive(d, len(s)) for d in ([dim] if isinstance(dim, int) else dim)]
    return b.reshape(x, [n for d, n in enumerate(s) if n != 1 or d not in dims])


@lowering(aten.unsqueeze.default)
def unsqueeze(b: Builder, x: fx.Node, dim: int) -> fx.Node:
    s = shape(x)
    d = positive(dim, len(s) + 1)
    return b.emit(aten.unsqueeze.default, x, d, spec=Spec((*s[:d], 1, *s[d:]), dtype(x)))


@lowering(aten.expand.default, aten.broadcast_to.default)
def expand(b: Builder, x: fx.Node, to: Any, **_: Any) -> fx.Node:
    pad = len(to) - len(shape(x))
    return b.expand(x, [shape(x)[i - pad] if n == -1 else n for i, n in enumerate(to)])


@lowering(aten.expand_as.default)
def expand_as(b: Builder, x: fx.Node, other: fx.Node) -> fx.Node:
    return b.expand(x, shape(other))


@lowering(aten.view_as.default, aten.reshape_as.default)
def view_as(b: Builder, x: fx.Node, other: fx.Node) -> fx.Node:
    return b.reshape(x, shape(other))


@lowering(aten.broadcast_tensors.default)
def broadcast_tensors(b: Builder, xs: list[fx.Node]) -> list[fx.Node]:
    to = torch.broadcast_shapes(*(shape(x) for x in xs))
    return [b.expand(x, to) for x in xs]


@lowering(aten.permute.default)
def permute(b: Builder, x: fx.Node, dims: list[int]) -> fx.Node:
    return b.permute(x, [positive(d, len(dims)) for d in dims])


@lowering(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def transpose(b: Builder, x: fx.Node, first: int, second: int) -> fx.Node:
    dims = list(range(len(shape(x))))
    if dims:
        i, j = positive(first, len(dims)), positive(second, len(dims))
        dims[i], dims[j] = dims[j], dims[i]
    return b.permute(x, dims)


@lowering(aten.t.default, aten.mT.default, aten.numpy_T.default)
def turn(b: Builder, x: fx.Node) -> fx.Node:
    return transpose(b, x, -1, -2) if len(shape(x)) > 1 else x


@lowering(aten.select.int)
def select(b: Builder, x: fx.Node, dim: int, index: int) -> fx.Node:
    s, d = shape(x), positive(dim, len(shape(x)))
    i = positive(index, s[d])
    return b.emit(aten.select.int, x, d, i, spec=Spec((*s[:d], *s[d + 1 :]), dtype(x)))


@lowering(aten.unbind.int)
def unbind(b: Builder, x: fx.Node, dim: int = 0) -> list[fx.Node]:
    return [select(b, x, dim, i) for i in range(shape(x)[dim])]


def bounds(start: int | None, end: int | None, n: int) -> tuple[int, int]:
    """start and end of a slice of a dim of size n, clamped to it."""
    lo, hi, _ = slice(start, None if end is None or end >= END else end).indices(n)
    return lo, max(lo, hi)


@lowering(aten.slice.Tensor)
def slice_(b: Builder, x: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> fx.Node:
    s, d = shape(x), positive(dim, len(shape(x)))
    lo, hi = bounds(start, end, s[d])
    if step == 1:
        return b.cut(x, d, lo, hi)
    return b.emit(aten.slice.Tensor, x, d, lo, hi, step)


@lowering(aten.narrow.default)
def narrow(b: Builder, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    d = positive(dim, len(shape(x)))
    start = positive(start, shape(x)[d]) if start < 0 else start
    return b.cut(x, d, start, start + length)


@lowering(aten.slice_scatter.default)
def slice_scatter(b: Builder, x: fx.Node, src: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    s, d = shape(x), positive(dim, len(shape(x)))
    lo, hi = bounds(start, end, s[d])
    if step != 1:
        return b.emit(aten.slice_scatter.default, x, src, d, lo, hi, step)
    around = [(0, lo), (hi, s[d])]
    before, after = ([b.cut(x, d, i, j)] if j > i else [] for i, j in around)
    return b.cat([*before, b.cast(src, dtype(x)), *after], d) if hi > lo else x


@lowering(aten.select_scatter.default)
def select_scatter(b: Builder, x: fx.Node, src: fx.Node, dim: int, index: int) -> Any:
    d = positive(dim, len(shape(x)))
    i = positive(index, shape(x)[d])
    return slice_scatter(b, x, unsqueeze(b, src, d), d, i, i + 1)


@lowering(aten.cat.default)
def cat(b: Builder, xs: list[fx.Node], dim: int = 0) -> fx.Node:
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
def stack(b: Builder, xs: list[fx.Node], dim: int = 0) -> fx.Node:
    d = positive(dim, len(shape(xs[0])) + 1)
    return cat(b, [unsqueeze(b, x, d) for x in xs], d)


def parted(b: Builder, x: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
    """``x`` in parts of ``sizes`` along ``dim``."""
    d = positive(dim, len(shape(x)))
    if len(sizes) == 1:
        return [x]
    s = shape(x)
    specs = tuple(Spec((*s[:d], n, *s[d + 1 :]), dtype(x)) for n in sizes)
    whole = b.emit(aten.split_with_sizes.default, x, list(sizes), d, spec=specs)
    return [b.apply(operator.getitem, whole, i) for i in range(len(sizes))]


@lowering(aten.split_with_sizes.default, aten.split.sizes)
def split_with_sizes(b: Builder, x: fx.Node, sizes: list[int], dim: int = 0) -> list[fx.Node]:
    return parted(b, x, sizes, dim)


@lowering(aten.split.Tensor)
def split(b: Builder, x: fx.Node, size: int, dim: int = 0) -> list[fx.Node]:
    n = shape(x)[dim]
    return parted(b, x, [min(size, n - i) for i in range(0, n, size)] or [0], dim)


@lowering(aten.chunk.default)
def chunk(b: Builder, x: fx.Node, chunks: int, dim: int = 0) -> list[fx.Node]:
    return split(b, x, max(-(-shape(x)[dim] // chunks), 1), dim)


@lowering(aten.repeat.default)
def repeat(b: Builder, x: fx.Node, times: list[int]) -> fx.Node:
    s = (1,) * (len(times) - len(shape(x))) + shape(x)
    apart = b.reshape(x, [k for n, t in zip(s, times) for k in ((1, n) if t > 1 else (n,))])
    wide = b.expand(apart, [k for n, t in zip(s, times) for k in ((t, n) if t > 1 else (n,))])
    return b.reshape(wide, [n * t for n, t in zip(s, times)])


@lowering(aten.repeat_interleave.self_int)
def repeat_interleave(b: Builder, x: fx.Node, times: int, dim: int | None = None, **_: Any) -> fx.Node:
    if dim is None:
        x, dim = b.reshape(x, [math.prod(shape(x))]), 0
    s, d = shape(x), positive(dim, len(shape(x)))
    wide = b.expand(unsqueeze(b, x, d + 1), (*s[: d + 1], times, *s[d + 1 :]))
    return b.reshape(wide, (*s[:d], s[d] * times, *s[d + 1 :]))


@lowering(aten.zeros.default, aten.empty.memory_format)
def zeros(b: Builder, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, 0, dtype or torch.get_default_dtype())


@lowering(aten.ones.default)
def ones(b: Builder, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, 1, dtype or torch.get_default_dtype())


@lowering(aten.full.default)
def full(b: Builder, to: Any, value: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, value, dtype or torch.full((), value, device="meta").dtype)


@lowering(aten.scalar_tensor.default)
def scalar_tensor(b: Builder, value: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full((), value, dtype or torch.get_default_dtype())


@lowering(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(b: Builder, x: fx.Node, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, 0, dtype or x.meta["spec"].dtype)


@lowering(aten.new_ones.default)
def new_ones(b: Builder, x: fx.Node, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, 1, dtype or x.meta["spec"].dtype)


@lowering(aten.new_full.default)
def new_full(b: Builder, x: fx.Node, to: Any, value: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, value, dtype or x.meta["spec"].dtype)


@lowering(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(b: Builder, x: fx.Node, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(shape(x), 0, dtype or x.meta["spec"].dtype)


@lowering(aten.ones_like.default)
def ones_like(b: Builder, x: fx.Node, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(shape(x), 1, dtype or x.meta["spec"].dtype)


@lowering(aten.full_like.default)
def full_like(b: Builder, x: fx.Node, value: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(shape(x), value, dtype or x.meta["spec"].dtype)


@lowering(aten.arange.default)
def arange(b: Builder, end: Any, **kwargs: Any) -> fx.Node:
    return arange_step(b, 0, end, **kwargs)


@lowering(aten.arange.start, aten.arange.start_step)
def arange_step(b: Builder, start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> fx.Node:
    """An iota with explicit start, step and dtype."""
    whole = all(isinstance(v, int) for v in (start, end, step))
    kind = dtype or (torch.int64 if whole else torch.get_default_dtype())
    return b.emit(aten.arange.start_step, start, end, step, dtype=kind)


@lowering(aten.tril.default)
def tril(b: Builder, x: fx.Node, diagonal: int = 0) -> fx.Node:
    return _triangle(b, x, aten.le.Tensor, diagonal)


@lowering(aten.triu.default)
def triu(b: Builder, x: fx.Node, diagonal: int = 0) -> fx.Node:
    return _triangle(b, x, aten.ge.Tensor, diagonal)


def _triangle(b: Builder, x: fx.Node, compare: Any, diagonal: int) -> fx.Node:
    """``x`` where column compares to row + diagonal, else 0: iotas, so that a shard knows its own rows."""
    rows, columns = (b.emit(aten.arange.start_step, lo, lo + n, 1) for lo, n in zip((diagonal, 0), shape(x)[-2:]))
    keep = b.emit(compare, columns, unsqueeze(b, rows, 1))
    if dtype(x) == torch.bool:
        return b.apply(aten.bitwise_and.Tensor, x, b.expand(keep, shape(x)))
    return b.emit(aten.where.self, keep, x, b.full((), 0, dtype(x)))


@lowering(aten.index_select.default)
def index_select(b: Builder, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    d = positive(dim, len(shape(x)))
    line = affine(index)
    if line is not None and line.terms in (((-1, 1),), ()) and len(shape(index)) == 1 and (line.terms or shape(index) == (1,)):
        return b.cut(x, d, line.const, line.const + shape(index)[0])
    return b.emit(aten.index_select.default, x, d, index)


@lowering(aten.index.Tensor)
def index_(b: Builder, x: fx.Node, indices: list[Any]) -> fx.Node:
    """Indexing by iotas is a view: each indexed dim is cut and moved to where its iota varies."""
    read = _iotas(x, indices)
    if read is None:
        return b.emit(aten.index.Tensor, x, list(indices))
    first, taken = read
    wide = torch.broadcast_shapes(*(shape(i) for i in indices if i is not None))
    for d, (at, start, n) in taken.items():
        x = b.cut(x, d, start, start + n)
    order = sorted(taken, key=lambda d: taken[d][0])
    last = max(taken)
    x = b.permute(x, [*range(first), *order, *range(last + 1, len(shape(x)))])
    lengths = {at: n for at, _, n in taken.values() if at < 0}
    middle = [lengths.get(at, 1) for at in range(-len(wide), 0)]
    s = shape(x)
    narrow = b.reshape(x, (*s[:first], *middle, *s[last + 1 :]))
    return b.expand(narrow, (*s[:first], *wide, *s[last + 1 :]))


def _iotas(x: fx.Node, indices: list[Any]) -> tuple[int, dict[int, tuple[int, int, int]]] | None:
    """(first indexed dim, {dim: (result dim from the end or 0 for a constant, start, length)}), all dims adjacent."""
    dims = [d for d, i in enumerate(indices) if i is not None]
    if not dims or dims != list(range(dims[0], dims[-1] + 1)):
        return None
    taken: dict[int, tuple[int, int, int]] = {}
    for d in dims:
        line, size = affine(indices[d]), shape(indices[d])
        if line is None or line.const < 0:
            return None
        varying = [(at, c) for at, c in line.terms if size[at] != 1]
        if len(varying) > 1 or any(c != 1 for _, c in varying):
            return None
        at, n = (varying[0][0], size[varying[0][0]]) if varying else (0, 1)
        if any(at == other for other, _, _ in taken.values() if at) or line.const + n > shape(x)[d]:
            return None
        taken[d] = (at, line.const, n)
    return dims[0], taken
