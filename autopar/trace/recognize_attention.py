"""Attention written out by hand (product, scale, mask, softmax, dropout, product) becomes the one op ``attention``.

Only where the result is the same for every input: each step's value has one reader, masks are added or hide scores by
a number (which stays that number, ``fill``), and no cast loses digits. A mask that is causal for every input goes into
the op; where every query sees a key, the fused kernels compute the same.
"""

from math import inf, prod
from typing import Any

import torch
from torch import fx

from autopar.ir import edit, ops
from autopar.trace.affine import shape_of
from autopar.trace.recognize import mask_kind, seen_kind
from autopar.trace.written_scores import PRODUCTS, WIDENING, Part, Written, scores_of

aten = torch.ops.aten
Signed = list[tuple[fx.Node, bool]]


def recognize_attention(graph: fx.Graph) -> None:
    """Rewrite every attention that is written out. Scores that anything else reads stay as they are."""
    edit.drop_dead(graph)  # averaged weights that nobody asked for are no readers
    for node in graph.find_nodes(op="call_function", target=aten.softmax.int):
        found = scores_of(node)
        tail = None if found is None else _tail_of(node, found)
        if found is not None and tail is not None:
            _Rewrite(graph, found, *tail).run()
    edit.drop_dead(graph)


def _tail_of(softmax: fx.Node, found: Written) -> tuple[fx.Node, float, int] | None:
    """The product with the values, and the dropout before it."""
    p, key, last = 0.0, 0, softmax
    node = _sole_reader(softmax)
    if softmax.args[1] != len(shape_of(softmax)) - 1:
        return None
    cut = found.sink is not None
    while node is not None and _passes(node, softmax, last):
        if node.target is aten.slice.Tensor:
            if not cut or not _leaves_sink(node, found):
                return None
            cut = False
        if node.target is aten.nan_to_num.default:
            if found.fill != -inf or found.bias or found.sink is not None or any(node.args[1:2]):
                return None
            found.zero = True
        if node.target is ops.dropout:
            if p:
                return None
            p, key = node.args[1], node.args[2]  # type: ignore[assignment]
        last = node
        node = _sole_reader(node)
    if node is None or cut or node.target not in PRODUCTS or node.args[0] is not last or node.args[1] is last:
        return None
    return node, p, key


def _passes(node: fx.Node, softmax: fx.Node, last: fx.Node) -> bool:
    """Whether the probabilities go on: dropped, cast back, with dims merged, without the sink's."""
    if node.target is aten._to_copy.default:
        return (node.meta["spec"].dtype, last.meta["spec"].dtype) in WIDENING
    if node.target is aten.reshape.default:
        return shape_of(node)[-2:] == shape_of(last)[-2:]
    return node.target in (ops.dropout, aten.slice.Tensor, aten.nan_to_num.default)


def _leaves_sink(node: fx.Node, found: Written) -> bool:
    known: Any = node.args
    size = shape_of(known[0])
    wanted = (1, size[-1]) if found.sink_first else (0, size[-1] - 1)
    return bool(known[1] == len(size) - 1 and known[2:] == wanted)


def _sole_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


class _Rewrite:
    """One written attention, made the op in front of its last product."""

    def __init__(self, graph: fx.Graph, found: Written, out: fx.Node, p: float, key: int) -> None:
        self.graph, self.found, self.out, self.p, self.key = graph, found, out, p, key

    def run(self) -> None:
        """Put the op in place; leave all as it is where queries, keys and values do not fit each other."""
        found, out = self.found, self.out
        q, turned = found.product.args[:2]
        v = out.args[1]
        assert isinstance(q, fx.Node) and isinstance(turned, fx.Node) and isinstance(v, fx.Node)
        ranks = {len(shape_of(x)) for x in (q, turned)} | {len(shape_of(out.args[0]))}  # type: ignore[arg-type]
        if len(ranks) != 1 or min(ranks) < 3 or q.meta["spec"].dtype != out.meta["spec"].dtype:
            return
        size = (*found.size[:-1], shape_of(turned)[-1])
        heads = _Heads.of(size[:-2], shape_of(q)[:-2], shape_of(turned)[:-2], shape_of(v)[:-2])
        if heads is None:
            return
        beside = [p.shape for p in (*found.bias, *found.hidden, *found.shut)]
        beside += [] if found.sink is None else [shape_of(found.sink)]
        if any(heads.mask(shape, size) is None for shape in beside):
            return
        with self.graph.inserting_before(out):
            made = self._op(q, turned, v, heads, size)
            edit.replace(out, self._reshaped(made, shape_of(out)))

    def _op(self, q: fx.Node, turned: fx.Node, v: fx.Node, heads: "_Heads", size: tuple[int, ...]) -> fx.Node:
        found = self.found
        causal = found.causal
        if not causal and size[-2] == size[-1]:
            causal = self._drop_whole_masks()
        bias, mask, fill = self._bias(heads, size), self._mask(heads, size), None if found.zero else found.fill
        for by, divides in found.by:
            q = self._call(aten.div.Tensor if divides else aten.mul.Tensor, q, by)
        if found.scale < 0:  # the fused kernels hide by a number that they scale
            q = self._call(aten.neg.default, q)
        q, k, v = (
            self._reshaped(x, (*lead, *shape_of(x)[-2:]))
            for x, lead in zip((q, self._transposed(turned), v), (heads.query, heads.key, heads.key))
        )
        if mask is None:
            mask, bias, fill = (bias, None, 0.0) if bias is not None and not causal else (None, bias, None)
            fill = 0.0 if bias is not None or mask is not None else None
        sink = None if found.sink is None else self._sink(found.sink, heads, size)
        args = (
            q, k, v, mask, self.p, causal, abs(found.scale), heads.query[-1] != heads.key[-1], self.key, fill,
            bias, sink, found.cap,
        )  # fmt: skip
        return edit.call(self.graph, ops.attention, args[: 10 if args[10:] == (None,) * 3 else 13], like=self.out)

    def _drop_whole_masks(self) -> bool:
        """Take out what is full for every input, or causal and alone in what it hides. True where one was causal."""
        found = self.found
        lowest = torch.finfo(found.product.meta["spec"].dtype).min * 0.99
        one = len(found.hidden) == 1 and not found.shut and found.fill is not None and found.fill <= lowest
        one = one and (not found.bias or found.fill == -inf)  # which may lower all that is seen
        kind = seen_kind(found.hidden[0].node, found.hidden[0].opposite) if one else ""
        if kind:
            found.hidden, found.fill = [], None
            return kind == "causal"
        only = not found.hidden and not found.shut and len(found.bias) == 1 and not found.bias[0].opposite
        kind = mask_kind(found.bias[0].node) if only else ""
        if kind:
            found.bias = []
        return kind == "causal"

    def _bias(self, heads: "_Heads", size: tuple[int, ...]) -> fx.Node | None:
        """The sum of what is added, with minus infinity for what was hidden before."""
        total: fx.Node | None = None
        for part in self.found.bias:
            to, x = self.found.added_in, self._split(part)
            x = self._call(aten.neg.default, x) if part.opposite else x
            x = x if to in (None, x.meta["spec"].dtype) else self._call(aten._to_copy.default, x, dtype=to)
            x = self._four(x, heads, size)
            total = x if total is None else self._call(aten.add.Tensor, total, x)
        for part in self.found.shut:
            kind = self.found.product.meta["spec"].dtype
            lowest, zero = (self._call(aten.full.default, [], value, dtype=kind) for value in (-inf, 0.0))
            x = self._four(self._split(part), heads, size)
            shut = self._call(aten.where.self, x, *((lowest, zero) if part.opposite else (zero, lowest)))
            total = shut if total is None else self._call(aten.add.Tensor, total, shut)
        return total

    def _mask(self, heads: "_Heads", size: tuple[int, ...]) -> fx.Node | None:
        """What is seen."""
        seen: fx.Node | None = None
        for part in self.found.hidden:
            x = self._split(part)
            x = self._call(aten.logical_not.default, x) if part.opposite else x
            x = self._four(x, heads, size)
            seen = x if seen is None else self._call(aten.logical_and.default, seen, x)
        return seen

    def _split(self, part: Part) -> fx.Node:
        return self._reshaped(part.node, part.shape)

    def _sink(self, sink: fx.Node, heads: "_Heads", size: tuple[int, ...]) -> fx.Node:
        if sink.target is aten.full.default:
            spec = sink.meta["spec"]
            return self._call(aten.full.default, [1] * (len(heads.query) + 2), sink.args[1], dtype=spec.dtype)
        return self._four(sink, heads, size)

    def _four(self, mask: fx.Node, heads: "_Heads", size: tuple[int, ...]) -> fx.Node:
        to = heads.mask(shape_of(mask), size)
        assert to is not None
        if prod(to) != prod(shape_of(mask)):  # a mask of some heads only, for heads in groups
            mask = self._call(aten.expand.default, mask, [*size[:-2], *shape_of(mask)[-2:]])
        return self._reshaped(mask, to)

    def _transposed(self, turned: fx.Node) -> fx.Node:
        """Keys [.., T, D] from what multiplies queries [.., D, T]."""
        rank = len(shape_of(turned))
        swap = [*range(rank - 2), rank - 1, rank - 2]
        if turned.target is aten.permute.default and list(turned.args[1]) == swap:  # type: ignore[arg-type]
            return turned.args[0]  # type: ignore[return-value]
        return self._call(aten.permute.default, turned, swap)

    def _reshaped(self, x: fx.Node, to: tuple[int, ...]) -> fx.Node:
        return x if shape_of(x) == to else self._call(aten.reshape.default, x, list(to))

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return edit.call(self.graph, target, args, kwargs, like=self.out)


class _Heads:
    """The dims before positions: ``query`` those of q (and of masks), ``key`` those of k and v, heads last."""

    def __init__(self, query: tuple[int, ...], key: tuple[int, ...], grouped: bool) -> None:
        self.query, self.key, self.grouped = query, key, grouped

    @staticmethod
    def of(lead: tuple[int, ...], q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> "_Heads | None":
        """From the leading dims of scores and of q, k, v; None where attention has no such heads."""
        if k != v or prod(q) != prod(lead):
            return None
        if q == k:
            return _Heads(lead, lead, False)
        if lead != q or len(q) != len(k):
            return None
        if len(q) >= 2 and q[:-1] == k[:-1] and k[-1] == 1 and len(q) <= 2:
            return _Heads(q, k, False)
        if len(q) >= 3 and q[:-1] == k[:-1] and k[-1] == 1:  # [.., groups, repeats] against [.., groups, 1]
            return _Heads((*q[:-2], q[-2] * q[-1]), k[:-1], True)
        return None

    def mask(self, shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a mask beside grouped heads; None where it does not broadcast to the scores."""
        wide = (1,) * (len(size) - len(shape)) + shape
        if len(shape) > len(size) or any(m not in (1, n) for m, n in zip(wide[:-2], size[:-2])):
            return None
        if not self.grouped or len(shape) <= 2:
            return shape
        groups, repeats = wide[-4:-2]
        return (*wide[:-4], 1 if groups == repeats == 1 else self.query[-1], *wide[-2:])
