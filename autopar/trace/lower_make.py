"""Normal forms of what makes tensors from numbers, and of indexing by them: constants, iotas, triangles, gathers."""

import math
from typing import Any

import torch
from torch import fx

from autopar.trace.affine import Affine, affine, truth
from autopar.trace.builder import Builder, aten, broadcast, dtype, lowering, positive, shape


@lowering(aten.zeros.default, aten.empty.memory_format)
def _zeros(b: Builder, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, 0, dtype or torch.get_default_dtype())


@lowering(aten.ones.default)
def _ones(b: Builder, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, 1, dtype or torch.get_default_dtype())


@lowering(aten.full.default)
def _full(b: Builder, to: Any, value: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, value, dtype or torch.full((), value, device="meta").dtype)


@lowering(aten.scalar_tensor.default)
def _scalar_tensor(b: Builder, value: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full((), value, dtype or torch.get_default_dtype())


@lowering(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(b: Builder, x: fx.Node, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, 0, dtype or x.meta["spec"].dtype)


@lowering(aten.new_ones.default)
def _new_ones(b: Builder, x: fx.Node, to: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, 1, dtype or x.meta["spec"].dtype)


@lowering(aten.new_full.default)
def _new_full(b: Builder, x: fx.Node, to: Any, value: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(to, value, dtype or x.meta["spec"].dtype)


@lowering(aten.zeros_like.default, aten.empty_like.default)
def _zeros_like(b: Builder, x: fx.Node, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(shape(x), 0, dtype or x.meta["spec"].dtype)


@lowering(aten.ones_like.default)
def _ones_like(b: Builder, x: fx.Node, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(shape(x), 1, dtype or x.meta["spec"].dtype)


@lowering(aten.full_like.default)
def _full_like(b: Builder, x: fx.Node, value: Any, *, dtype: Any = None, **_: Any) -> fx.Node:
    return b.full(shape(x), value, dtype or x.meta["spec"].dtype)


@lowering(aten.arange.default)
def _arange(b: Builder, end: Any, **kwargs: Any) -> fx.Node:
    return arange_step(b, 0, end, **kwargs)


@lowering(aten.arange.start, aten.arange.start_step)
def arange_step(b: Builder, start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> fx.Node:
    """An iota with explicit start, step and dtype."""
    whole = all(isinstance(v, int) for v in (start, end, step))
    kind = dtype or (torch.int64 if whole else torch.get_default_dtype())
    return b.emit(aten.arange.start_step, start, end, step, dtype=kind)


@lowering(aten.tril.default)
def _tril(b: Builder, x: fx.Node, diagonal: int = 0) -> fx.Node:
    return _triangle(b, x, aten.le.Tensor, diagonal)


@lowering(aten.triu.default)
def _triu(b: Builder, x: fx.Node, diagonal: int = 0) -> fx.Node:
    return _triangle(b, x, aten.ge.Tensor, diagonal)


def _triangle(b: Builder, x: fx.Node, compare: Any, diagonal: int) -> fx.Node:
    """``x`` where column compares to row + diagonal, else 0: iotas, so that a shard knows its own rows."""
    rows, columns = (b.emit(aten.arange.start_step, lo, lo + n, 1) for lo, n in zip((diagonal, 0), shape(x)[-2:]))
    keep = b.emit(compare, columns, b.apply(aten.unsqueeze.default, rows, 1))
    if dtype(x) == torch.bool and truth(x):
        return b.expand(keep, shape(x))
    if dtype(x) == torch.bool:
        return b.emit(aten.bitwise_and.Tensor, x, b.expand(keep, shape(x)))
    return b.emit(aten.where.self, keep, x, b.full((), 0, dtype(x)))


@lowering(aten.index_select.default)
def _index_select(b: Builder, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    d = positive(dim, len(shape(x)))
    if _iotas(x, [*(None for _ in range(d)), index]) is None or len(shape(index)) != 1:
        return b.emit(aten.index_select.default, x, d, index)
    return index_(b, x, [*(None for _ in range(d)), index])


@lowering(aten.gather.default)
def gather(b: Builder, x: fx.Node, dim: int, index: fx.Node, **_: Any) -> fx.Node:
    """Gathering by an iota is a cut."""
    d, s, to = positive(dim, len(shape(x))), shape(x), shape(index)
    line = affine(index) if to else None
    if line is not None and 0 <= line.const <= s[d] - to[d] and (*to[:d], *to[d + 1 :]) == (*s[:d], *s[d + 1 :]):
        terms = line.without(to).terms
        if terms == ((d - len(s), 1),) or (not terms and to[d] == 1):
            return b.cut(x, d, line.const, line.const + to[d])
    return b.emit(aten.gather.default, x, d, index)


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(b: Builder, x: fx.Node, indices: list[Any], values: fx.Node, accumulate: bool = False) -> fx.Node:
    """One number where a mask is true is a ``where``."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and dtype(mask) == torch.bool and math.prod(shape(values)) == 1 and not accumulate:
        wide = b.reshape(mask, (*shape(mask), *(1 for _ in shape(x)[len(shape(mask)) :])))
        return b.emit(aten.where.self, wide, b.reshape(b.cast(values, dtype(x)), ()), x)
    return b.emit(aten.index_put.default, x, list(indices), values, accumulate)


@lowering(aten.index.Tensor)
def index_(b: Builder, x: fx.Node, indices: list[Any]) -> fx.Node:
    """Indexing by iotas is a view: each indexed dim is cut and moved to where its iota varies."""
    read = _iotas(x, indices)
    if read is None:
        picked = None if any(i is None for i in indices) else _picked(b, x, indices)
        return b.emit(aten.index.Tensor, x, list(indices)) if picked is None else picked
    first, taken = read
    wide = broadcast(*(shape(i) for i in indices if i is not None))
    for d, (_, start, n) in taken.items():
        x = b.cut(x, d, start, start + n)
    order = sorted(taken, key=lambda d: taken[d][0])
    last = max(taken)
    x = b.permute(x, [*range(first), *order, *range(last + 1, len(shape(x)))])
    lengths = {at: n for at, _, n in taken.values() if at < 0}
    middle = [lengths.get(at, 1) for at in range(-len(wide), 0)]
    s = shape(x)
    narrow = b.reshape(x, (*s[:first], *middle, *s[last + 1 :]))
    return b.expand(narrow, (*s[:first], *wide, *s[last + 1 :]))


def _picked(b: Builder, x: fx.Node, indices: list[fx.Node]) -> fx.Node | None:
    """``x[arange(n), index]``, one element of each row: a gather, whose rows stay rows."""
    *rows, index = indices
    size, wide = shape(x), broadcast(*(shape(i) for i in indices))
    if len(rows) != len(wide) or not rows or dtype(index) == torch.bool or len(size) < len(indices):
        return None
    for d, row in enumerate(rows):
        line = affine(row)
        if line is None or line.const or line.terms != ((d - len(wide), 1),) or wide[d] != size[d]:
            return None
    at, rest = len(rows), size[len(indices) :]
    index = b.expand(index, wide)
    negative = b.emit(aten.lt.Scalar, index, 0)  # counts from the end; what is no index at all stays none
    place = b.emit(aten.where.self, negative, b.emit(aten.add.Tensor, index, size[at]), index)
    place = b.expand(b.reshape(place, (*wide, 1, *(1 for _ in rest))), (*wide, 1, *rest))
    return b.reshape(gather(b, x, at, place), (*wide, *rest))


def _iotas(x: fx.Node, indices: list[Any]) -> tuple[int, dict[int, tuple[int, int, int]]] | None:
    """(first indexed dim, {dim: (result dim from the end or 0 for a constant, start, length)}), all dims adjacent."""
    dims = [d for d, i in enumerate(indices) if i is not None]
    if not dims or dims != list(range(dims[0], dims[-1] + 1)):
        return None
    taken: dict[int, tuple[int, int, int]] = {}
    for d in dims:
        line, size = affine(indices[d]), shape(indices[d])
        if line is None:
            return None
        line = line.plus(Affine((), shape(x)[d])) if line.const < 0 else line
        varying = [(at, c) for at, c in line.terms if size[at] != 1]
        if len(varying) > 1 or any(c != 1 for _, c in varying):
            return None
        at, n = (varying[0][0], size[varying[0][0]]) if varying else (0, 1)
        if any(at == other for other, _, _ in taken.values() if at) or not 0 <= line.const <= shape(x)[d] - n:
            return None
        taken[d] = (at, line.const, n)
    return dims[0], taken
