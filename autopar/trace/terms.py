"""A value as a sum of experts' rows: which row of which expert's result is where, times which weights.

A value [..., O] is looked at as rows, its leading dims flattened. Ops that move rows, add or weigh them are followed
with numbers of rows; anything else that reads experts' parameters is what an expert computes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.trace.selections import (
    CASTS,
    COPIES,
    SELECTIONS,
    Casts,
    dtype_of,
    leading,
    moved,
    numbers_of,
    same,
    selected,
)
from autopar.trace.witness import UNSET, ZEROS, aten

Weight = tuple[fx.Node, Tensor, Casts]  # a value, which of its elements weighs each row, what it is cast to
DYNAMIC = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.repeat_interleave.Tensor, aten.bincount.default,
}  # fmt: skip


def widens(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether every number of one dtype is one of the other."""
    return torch.promote_types(old, new) == new


@dataclass(frozen=True)
class Segment:
    """Rows of one expert's result.

    Args:
        source: the result. at: [m], its rows. rows: [m], where they are. weights: what each is multiplied by.
        casts: dtypes to which the result is cast before that, one after the other.
        narrow: the dtype in which the weighted rows lost digits; None where they lost none.
    """

    source: fx.Node
    at: Tensor
    rows: Tensor
    weights: tuple[Weight, ...] = ()
    casts: Casts = ()
    narrow: torch.dtype | None = None

    def keep(self, mask: Tensor) -> "Segment":
        """Some of the rows."""
        weights = tuple((w, places[mask], casts) for w, places, casts in self.weights)
        return replace(self, at=self.at[mask], rows=self.rows[mask], weights=weights)

    def cast(self, old: torch.dtype, new: torch.dtype) -> "Segment | None":
        """The rows in another dtype of floats; None where what they lost would be kept."""
        if not self.weights:
            return replace(self, casts=(*self.casts, new))
        if self.narrow is not None:
            return None
        return self if widens(old, new) else replace(self, narrow=new)


@dataclass(frozen=True)
class Terms:
    """A value of ``count`` rows: the segments' rows added up, and rows ``carried`` of ``base`` (-1: none of them)."""

    count: int
    segments: tuple[Segment, ...] = ()
    base: fx.Node | None = None
    carried: Tensor | None = None

    def chosen(self, old: Tensor) -> "Terms | None":
        """The rows ``old`` [n] of this value; None where one is taken twice."""
        if len(old.unique()) != len(old):
            return None
        new = torch.full((self.count,), -1)
        new[old] = torch.arange(len(old))
        moved = (replace(s, rows=new[s.rows]) for s in self.segments)
        carried = None if self.carried is None else self.carried[old]
        return Terms(len(old), _full(s.keep(s.rows >= 0) for s in moved), self.base, carried)

    def placed(self, rows: Tensor, count: int) -> "Terms":
        """These rows at ``rows`` of a value of ``count`` rows, nothing elsewhere."""
        carried = None
        if self.carried is not None:
            carried = torch.full((count,), -1)
            carried[rows] = self.carried
        return Terms(count, tuple(replace(s, rows=rows[s.rows]) for s in self.segments), self.base, carried)

    def without(self, rows: Tensor) -> "Terms":
        """Nothing at ``rows``."""
        gone = torch.zeros(self.count, dtype=torch.bool)
        gone[rows] = True
        carried = None if self.carried is None else self.carried.masked_fill(gone, -1)
        return Terms(self.count, _full(s.keep(~gone[s.rows]) for s in self.segments), self.base, carried)

    def plus(self, other: "Terms") -> "Terms | None":
        """The sum; None where it would carry two values' rows."""
        base, carried = self.base, self.carried
        if other.carried is not None and bool((other.carried >= 0).any()):
            if carried is not None and bool((carried >= 0).any()):
                both = (carried >= 0) & (other.carried >= 0)
                if other.base is not base or bool(both.any()):
                    return None
                carried = torch.where(carried >= 0, carried, other.carried)
            else:
                base, carried = other.base, other.carried
        return Terms(self.count, self.segments + other.segments, base, carried)


def _full(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(s for s in segments if len(s.rows))


class Reader:
    """Reads values as terms."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, Terms | None] = {}

    def terms(self, node: fx.Node) -> Terms | None:
        """The value as terms; None where it is none."""
        chain: list[Any] = [node]  # each adds to the next one, as often as there are experts
        while chain[-1].target in CHAINED and isinstance(chain[-1].args[0], fx.Node) and chain[-1] not in self.known:
            chain.append(chain[-1].args[0])
        for one in reversed(chain):
            self.known[one] = self.known[one] if one in self.known else self._read(one)
        return self.known[node]

    def _read(self, node: fx.Node) -> Terms | None:
        if not isinstance(node.meta["val"], Tensor) or node.meta["val"].ndim < 1:
            return None
        count = int(torch.Size(leading(node)).numel())
        if node.target in ZEROS or node.target in UNSET:
            return Terms(count)
        if not node.meta["expert"]:
            source, rows, casts = selected(node)
            if source.target in ZEROS:
                return Terms(count)
            return Terms(count, (), node, torch.arange(count)) if casts else Terms(count, (), source, rows)
        rule = RULES.get(node.target)
        found = rule(self, node, count) if rule else None
        if found is not None and any(s.narrow not in (None, dtype_of(node)) for s in found.segments):
            found = None  # added to wider ones without a cast
        return whole(node) if found is None and node.target not in ADDING else found


def whole(node: fx.Node) -> Terms:
    """The value as what an expert computes."""
    count = int(torch.Size(leading(node)).numel())
    return Terms(count, (Segment(node, torch.arange(count), torch.arange(count)),))


def raw(terms: Terms | None, node: fx.Node) -> bool:
    """Whether a value is nothing but what an expert computes."""
    return terms is not None and len(terms.segments) == 1 and not terms.segments[0].weights and terms.carried is None


def _same(read: Reader, node: fx.Node, count: int) -> Terms | None:
    source: Any = node.args[0]
    inner = read.terms(source) if same(node) else None
    old, new = dtype_of(source), dtype_of(node)
    if inner is None or old == new or not new.is_floating_point:
        return inner
    if inner.carried is not None and bool((inner.carried >= 0).any()):
        return None
    rows = torch.cat([torch.empty(0, dtype=torch.long), *(s.rows for s in inner.segments)])
    if not widens(old, new) and len(rows.unique()) != len(rows):
        return None  # a sum in the wider dtype
    made = [s.cast(old, new) for s in inner.segments]
    return None if None in made else replace(inner, segments=tuple(s for s in made if s is not None))


def _select(read: Reader, node: fx.Node, count: int) -> Terms | None:
    source: Any = node.args[0]
    numbers = moved(node, numbers_of((*leading(source), 1)), narrow=True)
    inner = read.terms(source) if numbers is not None else None
    return inner.chosen(numbers.reshape(-1)) if inner is not None and numbers is not None else None


def _join(read: Reader, node: fx.Node, count: int) -> Terms | None:
    """``cat`` and ``stack`` along a dim of rows."""
    parts: Any = node.args[0]
    dim, ndim = (node.args[1] if len(node.args) > 1 else 0), node.meta["val"].ndim
    dim %= ndim
    if dim == ndim - 1:
        return None
    rows, at, total = numbers_of(leading(node)), 0, Terms(count)
    for part in parts:
        if part.meta["val"].ndim == 1 and node.target is aten.cat.default:
            continue  # an old-fashioned empty tensor
        many = 1 if node.target is aten.stack.default else part.meta["val"].shape[dim]
        inner = read.terms(part)
        if inner is None:
            return None
        joined = total.plus(inner.placed(rows.narrow(dim, at, many).reshape(-1), count))
        if joined is None:
            return None
        total, at = joined, at + many
    return total


def _add(read: Reader, node: fx.Node, count: int) -> Terms | None:
    a, b = node.args[:2]
    if node.kwargs or len(node.args) > 2:
        return None
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return read.terms(a if isinstance(a, fx.Node) else b) if 0 in (a, b) else None  # type: ignore[arg-type]
    if a.meta["val"].shape != b.meta["val"].shape:
        return None
    left, right = read.terms(a), read.terms(b)
    if len(a.meta["expert"]) == 1 and a.meta["expert"] == b.meta["expert"] and raw(left, a) and raw(right, b):
        return None
    return left.plus(right) if left is not None and right is not None else None


def _weigh(read: Reader, node: fx.Node, count: int) -> Terms | None:
    """A product with what does not depend on an expert and is one number for each row."""
    for y, w in (node.args, node.args[::-1]):
        if not isinstance(w, fx.Node) or not isinstance(y, fx.Node) or w.meta["expert"] or not y.meta["expert"]:
            continue
        shape, mine = node.meta["val"].shape, w.meta["val"].shape
        inner = read.terms(y)
        if inner is not None and inner.carried is not None and len(y.meta["expert"]) == 1:
            inner = whole(y)
        if inner is None or y.meta["val"].shape != shape or (mine and mine[-1] != 1):
            return None
        places = numbers_of(tuple(mine)).expand((*shape[:-1], 1)).reshape(-1)
        return _weighted(inner, w, places)
    return None


def _weighted(inner: Terms, w: fx.Node, places: Tensor) -> Terms | None:
    if inner.carried is not None and bool((inner.carried >= 0).any()):
        return None
    if any(s.narrow is not None for s in inner.segments):
        return None
    source, numbers, casts = selected(w, narrow=False)
    segments = (replace(s, weights=(*s.weights, (source, numbers[places[s.rows]], casts))) for s in inner.segments)
    return replace(inner, segments=tuple(segments))


def _sum(read: Reader, node: fx.Node, count: int) -> Terms | None:
    """Rows added up along dims of rows."""
    source: Any = node.args[0]
    ndim = source.meta["val"].ndim
    dims = [d % ndim for d in node.args[1] or range(ndim)]  # type: ignore[union-attr]
    inner = read.terms(source)
    if inner is None or ndim - 1 in dims or (inner.carried is not None and bool((inner.carried >= 0).any())):
        return None
    kept = [1 if d in dims else n for d, n in enumerate(leading(source))]
    rows = numbers_of(tuple(kept)).expand(leading(source)).reshape(-1)
    return replace(inner.placed(rows, count), base=None, carried=None)


def _mix(read: Reader, node: fx.Node, count: int) -> Terms | None:
    """Weights [n, 1, e] times rows [n, e, O]."""
    w, y = node.args
    assert isinstance(w, fx.Node) and isinstance(y, fx.Node)
    if w.meta["expert"] or w.meta["val"].shape[1] != 1:
        return None
    inner = read.terms(y)
    n, _, e = w.meta["val"].shape
    weighted = _weighted(inner, w, torch.arange(n * e)) if inner is not None else None
    return weighted.placed(torch.arange(n).repeat_interleave(e), count) if weighted is not None else None


def _index_add(read: Reader, node: fx.Node, count: int) -> Terms | None:
    target, dim, index, source = node.args[:4]
    rows = index.meta.get("number")  # type: ignore[union-attr]
    if node.kwargs or rows is None or dim != 0 or target.meta["val"].ndim != 2:  # type: ignore[union-attr]
        return None
    return _into(read, target, rows, source, node.target is aten.index_add.default)


def _scatter(read: Reader, node: fx.Node, count: int) -> Terms | None:
    """An index that is the same along the last dim."""
    target, dim, index, source = node.args[:4]
    rows = index.meta.get("number")  # type: ignore[union-attr]
    if rows is None or rows.ndim != 2 or dim != 0 or bool((rows != rows[:, :1]).any()):
        return None
    whole = rows.shape == source.meta["val"].shape and rows.shape[1] == target.meta["val"].shape[1]  # type: ignore
    return _into(read, target, rows[:, 0], source, node.target is aten.scatter_add.default) if whole else None


def _index_put(read: Reader, node: fx.Node, count: int) -> Terms | None:
    target, indices, source = node.args[:3]
    numbers = fx.map_arg(list(indices), lambda n: n.meta.get("number"))  # type: ignore[arg-type]
    if any(i is not None and n is None for i, n in zip(indices, numbers)):  # type: ignore[arg-type]
        return None
    shape = leading(target)  # type: ignore[arg-type]
    try:
        rows = torch.ops.aten.index.Tensor(numbers_of(shape), numbers)
    except (RuntimeError, IndexError):
        return None
    want = (*rows.shape, target.meta["val"].shape[-1])  # type: ignore[union-attr]
    given = tuple(source.meta["val"].shape)  # type: ignore[union-attr]
    if given != want[len(want) - len(given) :] or rows.numel() * want[-1] != torch.Size(given).numel():
        return None  # but leading dims of 1 are left out by ``x[rows] = y``
    return _into(read, target, rows.reshape(-1), source, add=bool(node.args[3:] and node.args[3]))


def _into(read: Reader, target: Any, rows: Tensor, source: Any, add: bool) -> Terms | None:
    before, new = read.terms(target), read.terms(source)
    if before is None or new is None or (not add and len(rows.unique()) != len(rows)):
        return None
    return (before if add else before.without(rows)).plus(new.placed(rows, before.count))


ADDING = {aten.index_add.default, aten.index_put.default, aten.scatter_add.default, aten.cat.default}
CHAINED = ADDING - {aten.cat.default} | {aten.add.Tensor}
RULES: dict[Any, Any] = {
    **dict.fromkeys(SELECTIONS, _select),
    **dict.fromkeys((*CASTS, *COPIES), _same),
    **dict.fromkeys((aten.cat.default, aten.stack.default), _join),
    aten.add.Tensor: _add,
    aten.mul.Tensor: _weigh,
    aten.sum.dim_IntList: _sum,
    aten.bmm.default: _mix,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_add,
    aten.scatter_add.default: _scatter,
    aten.scatter.src: _scatter,
    aten.index_put.default: _index_put,
}
