"""What a bool mask is made of: bands of positions, numbers of documents, keys that are hidden from all, and the rest.

A mask that is a conjunction of these need not be held for every pair of a query and a key: attention that is computed
in tiles makes each tile's part. Only what is the same for every query that sees a key is taken out.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir import edit, ops
from autopar.rules.arguments import arguments, names
from autopar.trace.affine import Affine, conditions, element, shape_of, source_dims
from autopar.trace.recognize import seen_parts

aten = torch.ops.aten
ANDS = (aten.bitwise_and.Tensor, aten.logical_and.default)
ORS = (aten.bitwise_or.Tensor, aten.logical_or.default)
NOTS = (aten.bitwise_not.default, aten.logical_not.default)
VIEWS = (aten.unsqueeze.default, aten.reshape.default, aten.expand.default)
Places = dict[int, int]  # dim of the mask (from the end) -> dim of a part (from the end)


@dataclass
class Parts:
    """A mask [.., S, T] as a conjunction."""

    low: int | None = None
    high: int | None = None
    ids: tuple[fx.Node, fx.Node] | None = None  # numbers of queries and of keys
    rest: list[tuple[fx.Node, bool, Places]] = field(default_factory=list)  # bool parts, or their opposites

    @property
    def band(self) -> tuple[int | None, int | None] | None:
        """Bounds of query - key."""
        return None if self.low is None and self.high is None else (self.low, self.high)


def take_masks_apart(graph: fx.Graph) -> None:
    """Give every attention whose mask is a conjunction its band and numbers, and no mask of queries and keys."""
    for node in graph.find_nodes(op="call_function", target=ops.attention):
        known = arguments(node)
        mask, size = known["mask"], len(shape_of(known["q"]))
        if mask is None or known["band"] is not None or size != 4 or len(shape_of(mask)) < 2:
            continue
        found = parts_of(known)
        if found is not None:
            with graph.inserting_before(node):
                _put(graph, node, found)
    edit.drop_dead(graph)


def parts_of(known: dict[str, Any]) -> Parts | None:
    """The parts of an attention's mask; None where nothing is won, or what is hidden by a number may count."""
    mask, fill = known["mask"], known["fill"]
    spec = mask.meta["spec"]
    if spec.dtype == torch.bool:
        seen, opposite, lowest = mask, False, -math.inf if fill is None else fill
    else:
        added = seen_parts(mask) if fill in (None, 0.0) else None
        if added is None:
            return None
        seen, opposite, lowest = added
    size = shape_of(mask)
    whole = {d: d for d in range(-len(size), 0) if size[d] != 1}
    found = Parts()
    _collect(found, seen, opposite, whole)
    if any(-2 in at and -1 in at for _, _, at in found.rest) or (found.band is None and found.ids is None):
        return None
    return found if lowest == -math.inf or _hides_all(found, known, lowest) else None


def _hides_all(found: Parts, known: dict[str, Any], lowest: float) -> bool:
    """Whether a finite number hides like minus infinity: every query sees its own key, whose score nothing lowers."""
    square = shape_of(known["q"])[-2] == shape_of(known["k"])[-2]
    low = torch.finfo(known["q"].meta["spec"].dtype).min * 0.99
    if not square or found.rest or known["bias"] is not None or lowest > low:
        return False
    same = found.ids is None or _source(found.ids[0]) is _source(found.ids[1])
    return (found.low or 0) <= 0 and (found.high or 0) >= 0 and same


def _source(node: fx.Node) -> fx.Node:
    while node.target in (aten.unsqueeze.default, aten.reshape.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _collect(found: Parts, node: fx.Node, opposite: bool, at: Places) -> None:
    """Add a bool value (or its opposite) that is read at ``at`` to the parts."""
    while True:
        if node.target in NOTS:
            node, opposite = node.args[0], not opposite  # type: ignore[assignment]
        elif node.target in VIEWS and (dims := source_dims(node)) is not None:
            at = {d: dims[s] for d, s in at.items() if s in dims}
            node = node.args[0]  # type: ignore[assignment]
        else:
            break
    if node.target in (ORS if opposite else ANDS):
        for part in node.args:
            assert isinstance(part, fx.Node)
            _collect(found, part, opposite, _aligned(at, part))
    elif not (_take_band(found, node, opposite, at) or _take_ids(found, node, opposite, at)):
        found.rest.append((node, opposite, at))


def _aligned(at: Places, part: fx.Node) -> Places:
    """Where a broadcast operand is read: its dims of length 1 and those that it lacks are left out."""
    size = shape_of(part)
    return {d: s for d, s in at.items() if -s <= len(size) and size[s] != 1}


def _take_band(found: Parts, node: fx.Node, opposite: bool, at: Places) -> bool:
    known = conditions(node)
    if known is None or (opposite and len(known) != 1):
        return False
    size, low, high = shape_of(node), found.low, found.high
    for condition in known:
        condition = Affine((), -1).plus(condition, -1) if opposite else condition
        if condition.lowest(size) >= 0:
            continue
        terms = {d: c for d, c in condition.reduced.terms if size[d] != 1}
        if set(terms) != {at.get(-2), at.get(-1)} or sorted(terms.values()) != [-1, 1]:
            return False
        bound = condition.reduced.const
        if terms[at[-2]] == 1:  # query - key + bound >= 0
            low = -bound if low is None else max(low, -bound)
        else:
            high = bound if high is None else min(high, bound)
    if not _confirmed(node, opposite, at, known):
        return False
    found.low, found.high = low, high
    return True


def _confirmed(node: fx.Node, opposite: bool, at: Places, known: list[Affine]) -> bool:
    """Whether the ops themselves give what the conditions say, on sampled entries: at bounds and at both ends."""
    size = shape_of(node)
    q, k = at.get(-2), at.get(-1)
    rows = {0, 1, 2, (size[q] if q else 1) // 2, (size[q] if q else 1) - 1}
    shifts = {0, *(s * c.const + e for c in known for s in (1, -1) for e in (-1, 0, 1))}
    for row in sorted(r for r in rows if 0 <= r < (size[q] if q else 1)):
        columns = {0, (size[k] if k else 1) - 1, *(row + s for s in shifts)}
        for column in sorted(c for c in columns if 0 <= c < (size[k] if k else 1)):
            index = tuple(row if d == q else column if d == k else 0 for d in range(-len(size), 0))
            if bool(element(node, index)) != all(c.const + sum(w * index[d] for d, w in c.terms) >= 0 for c in known):
                return False
    return True


def _take_ids(found: Parts, node: fx.Node, opposite: bool, at: Places) -> bool:
    """Equality of a number of the query and one of the key, once."""
    if found.ids is not None or node.target is not (aten.ne.Tensor if opposite else aten.eq.Tensor):
        return False
    pair = [a for a in node.args if isinstance(a, fx.Node) and not a.meta["spec"].is_float]
    reads = [_aligned(at, a) for a in pair]
    if len(pair) != 2 or any(r.keys() - {-4, -2, -1} for r in reads):
        return False
    if -2 in reads[1] and -1 in reads[0]:
        pair, reads = pair[::-1], reads[::-1]
    if -1 in reads[0] or -2 in reads[1] or -2 not in reads[0] or -1 not in reads[1]:
        return False
    found.ids = (pair[0], pair[1])
    return True


def _put(graph: fx.Graph, node: fx.Node, found: Parts) -> None:
    """Write the parts into the arguments of the attention."""
    q, k = (shape_of(arguments(node)[n]) for n in "qk")
    seen: fx.Node | None = None
    for part, opposite, at in found.rest:
        size = shape_of(part)
        wide = [size[at[d]] if d in at else 1 for d in range(-4, 0)]
        x = edit.call(graph, aten.reshape.default, (part, wide), like=node) if list(size) != wide else part
        x = edit.call(graph, aten.logical_not.default, (x,), like=node) if opposite else x
        seen = x if seen is None else edit.call(graph, aten.logical_and.default, (seen, x), like=node)
    known = arguments(node)
    known.update(mask=seen, band=found.band, fill=None if seen is None else known["fill"])
    if found.band == (0, None) and q[-2] == k[-2]:
        known.update(is_causal=True, band=None)
    if found.ids is not None:
        pair = (_numbers(graph, node, x, size[-2]) for x, size in zip(found.ids, (q, k)))
        known.update(zip(("query_ids", "key_ids"), pair))
    node.args, node.kwargs = tuple(known[n] for n, _ in names(ops.attention)), {}


def _numbers(graph: fx.Graph, node: fx.Node, x: fx.Node, length: int) -> fx.Node:
    """[B or 1, length]."""
    return edit.call(graph, aten.reshape.default, (x, [math.prod(shape_of(x)) // length, length]), like=node)
