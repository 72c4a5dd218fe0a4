"""Attention written out by hand (product, scale, mask, softmax, dropout, product) becomes the one op ``attention``.

Only where the result is the same for every input: each step's value has one reader, the mask is added or hides scores
by a number (which stays that number, ``fill``), and no cast loses digits. A mask that is causal for every input goes
into the op; where every query sees a key, the fused kernels compute the same.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir import edit, ops
from autopar.trace.affine import shape_of
from autopar.trace.recognize import mask_kind, seen_kind

aten = torch.ops.aten
PRODUCTS = (aten.matmul.default, aten.bmm.default)
WIDENING = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}


@dataclass
class _Scores:
    """The product behind a softmax: queries, transposed keys, and what was done to the scores."""

    product: fx.Node
    scale: float = 1.0
    mask: fx.Node | None = None
    opposite: bool = False  # the mask says what is hidden
    fill: float | None = None
    added_in: torch.dtype | None = None  # what scores and an added mask were, or were promoted to


def recognize_attention(graph: fx.Graph) -> None:
    """Rewrite every attention that is written out. Scores that anything else reads stay as they are."""
    edit.drop_dead(graph)  # averaged weights that nobody asked for are no readers
    for node in graph.find_nodes(op="call_function", target=aten.softmax.int):
        found, tail = _scores_of(node), _tail_of(node)
        if found is not None and tail is not None:
            _rewrite(graph, found, *tail)
    edit.drop_dead(graph)


def _tail_of(softmax: fx.Node) -> tuple[fx.Node, float, int] | None:
    """The product with the values, and the dropout before it."""
    p, key, node = 0.0, 0, _sole_reader(softmax)
    if softmax.args[1] != len(shape_of(softmax)) - 1:
        return None
    while node is not None and (node.target is ops.dropout or _is_cast_back(node, softmax)):
        if node.target is ops.dropout:
            if p:
                return None
            p, key = node.args[1], node.args[2]  # type: ignore[assignment]
        node = _sole_reader(node)
    if node is None or node.target not in PRODUCTS or node.args[1] in (node.args[0], softmax):
        return None
    first = node.args[0]
    return (node, p, key) if isinstance(first, fx.Node) and len(first.users) == 1 and _leads(softmax, first) else None


def _leads(softmax: fx.Node, node: fx.Node) -> bool:
    while node is not softmax and node.target in (ops.dropout, aten._to_copy.default):
        node = node.args[0]  # type: ignore[assignment]
    return node is softmax


def _sole_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_cast_back(node: fx.Node, softmax: fx.Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    pair = node.meta["spec"].dtype, node.args[0].meta["spec"].dtype  # type: ignore[union-attr]
    return pair in WIDENING and _leads(softmax, node.args[0])  # type: ignore[arg-type]


def _scores_of(softmax: fx.Node) -> _Scores | None:
    """From the softmax back to the product of queries and keys; None where anything else is on the way."""
    steps, node = [], softmax.args[0]
    while isinstance(node, fx.Node) and node.target not in PRODUCTS:
        back = _step(node, shape_of(softmax))
        if back is None or len(node.users) != 1:
            return None
        steps.append((node, back))
        node = node.args[back]
    if not isinstance(node, fx.Node) or len(node.users) != 1 or node.args[0] is node.args[1]:
        return None
    found = _Scores(node)
    for step, back in reversed(steps):  # from the product on
        if not _apply(found, step, back):
            return None
    return found


def _step(node: fx.Node, size: tuple[int, ...]) -> int | None:
    """Which argument of a step holds the scores; None for an op that attention does not have."""
    if node.target in (
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.add.Tensor,
        aten.masked_fill.Scalar,
        aten._to_copy.default,
    ):
        return _place(node, (0, 1) if node.target in (aten.mul.Tensor, aten.add.Tensor) else (0,), size)
    return _place(node, (1, 2), size) if node.target is aten.where.self else None


def _place(node: fx.Node, at: tuple[int, ...], size: tuple[int, ...]) -> int | None:
    """The one argument that has the scores' shape and comes from a product."""
    found = [i for i in at if isinstance(node.args[i], fx.Node) and _from_product(node.args[i], size)]  # type: ignore[arg-type]
    return found[0] if len(found) == 1 else None


def _from_product(node: fx.Node, size: tuple[int, ...]) -> bool:
    while isinstance(node, fx.Node) and node.op == "call_function" and shape_of(node) == size:
        if node.target in PRODUCTS:
            return True
        if node.target is aten.where.self:
            return any(_from_product(a, size) for a in node.args[1:] if isinstance(a, fx.Node))
        if node.target not in (
            aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.masked_fill.Scalar, aten._to_copy.default,
        ):  # fmt: skip
            return False
        parts = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if node.target is aten.add.Tensor and len(parts) == 2:
            return any(_from_product(a, size) for a in parts)
        node = parts[0]
    return False


def _apply(found: _Scores, node: fx.Node, back: int) -> bool:
    """Take one step into ``found``; False where attention cannot say it."""
    if node.target is aten._to_copy.default:
        return (node.args[0].meta["spec"].dtype, node.meta["spec"].dtype) in WIDENING  # type: ignore[union-attr]
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        by = _number(node.args[1 - back] if node.target is aten.mul.Tensor else node.args[1])
        if by is None or found.mask is not None or node.kwargs or not by:
            return False
        found.scale *= by if node.target is aten.mul.Tensor else 1.0 / by
        return math.isfinite(found.scale) and found.scale != 0
    if found.mask is not None or node.kwargs:
        return False
    if node.target is aten.add.Tensor:
        found.mask, found.fill, found.added_in = _tensor(node.args[1 - back]), 0.0, node.meta["spec"].dtype
        if found.mask is None or not found.mask.meta["spec"].is_float:  # a bool mask would hide, but adds 1
            return False
    elif node.target is aten.masked_fill.Scalar:
        found.mask, found.fill, found.opposite = _tensor(node.args[1]), _number(node.args[2]), True
    else:
        found.mask, found.fill, found.opposite = _tensor(node.args[0]), _number(node.args[3 - back]), back == 2
    return found.mask is not None and found.fill is not None and len(shape_of(found.mask)) >= 2


def _tensor(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _number(value: Any) -> float | None:
    """A number, or a tensor that is one number."""
    if isinstance(value, fx.Node):
        value = value.args[1] if value.target is aten.full.default else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _rewrite(graph: fx.Graph, found: _Scores, out: fx.Node, p: float, key: int) -> None:
    q, turned = found.product.args[:2]
    v = out.args[1]
    assert isinstance(q, fx.Node) and isinstance(turned, fx.Node) and isinstance(v, fx.Node)
    ranks = {len(shape_of(x)) for x in (q, turned, v)}
    lead = {shape_of(x)[:-2] for x in (q, turned, v)}
    if len(ranks) != 1 or len(lead) != 1 or min(ranks) < 3 or q.meta["spec"].dtype != out.meta["spec"].dtype:
        return
    mask, fill, causal = found.mask, found.fill, False
    if mask is not None and shape_of(q)[-2] == shape_of(turned)[-1]:
        kind = _kind(found)
        if kind:
            mask, fill, causal = None, None, kind == "causal"
    with graph.inserting_before(out):
        k = _transposed(graph, turned)
        if mask is not None and found.opposite:
            mask = edit.call(graph, aten.logical_not.default, (mask,), like=out)
        if mask is not None and found.added_in not in (None, mask.meta["spec"].dtype):
            mask = edit.call(graph, aten._to_copy.default, (mask,), {"dtype": found.added_in}, like=out)
        if found.scale < 0:  # the fused kernels hide by a number that they scale
            q = edit.call(graph, aten.neg.default, (q,), like=out)
        scale = abs(found.scale)
        args = (q, k, v, mask, p, causal, scale, False, key, fill if mask is not None else None)
        new = edit.call(graph, ops.attention, args, like=out, spec=out.meta["spec"])
    edit.replace(out, new)


def _kind(found: _Scores) -> str:
    """``mask_kind`` of what was done to the scores: "causal" or "full" where it is that for every input."""
    assert found.mask is not None
    if found.mask.meta["spec"].dtype != torch.bool:
        return mask_kind(found.mask)
    hides = found.fill is not None and found.fill <= torch.finfo(found.product.meta["spec"].dtype).min * 0.99
    return seen_kind(found.mask, found.opposite) if hides else ""


def _transposed(graph: fx.Graph, turned: fx.Node) -> fx.Node:
    """Keys [.., T, D] from what multiplies queries [.., D, T]."""
    rank = len(shape_of(turned))
    swap = [*range(rank - 2), rank - 1, rank - 2]
    if turned.target is aten.permute.default and list(turned.args[1]) == swap:  # type: ignore[arg-type]
        return turned.args[0]  # type: ignore[return-value]
    return edit.call(graph, aten.permute.default, (turned, swap), like=turned)
