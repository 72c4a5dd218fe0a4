"""The scores of an attention that is written out: the steps from the product of queries and keys to the softmax.

Steps are read backwards from the softmax and applied forwards to ``Written``, which holds what the op ``attention`` can
say: scale, cap, bias, one mask that hides, a causal mask after it, and a score beside those of keys.
"""

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.trace.affine import shape_of
from autopar.trace.recognize import seen_kind

aten = torch.ops.aten
PRODUCTS = (aten.matmul.default, aten.bmm.default)
WIDENING = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
MAXIMA = (aten.amax.default, aten.max.dim)
LINEAR = (aten.add.Tensor, aten.sub.Tensor)
SCALING = (aten.mul.Tensor, aten.div.Tensor)
UNARY = (aten.tanh.default, aten._to_copy.default, aten.reshape.default, aten.masked_fill.Scalar)
EITHER = (aten.mul.Tensor, aten.add.Tensor)


@dataclass(frozen=True)
class Part:
    """What is added to scores, or hides some of them.

    ``opposite``: it is subtracted; of a bool one, it says what is hidden. ``lead``: the dims before queries and keys,
    as those of the scores were split after it met them; None where they are its own.
    """

    node: fx.Node
    opposite: bool
    lead: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape beside the scores."""
        own = shape_of(self.node)
        return own if self.lead is None else (*self.lead, *own[-2:])


@dataclass
class Written:
    """The product behind a softmax: queries, transposed keys, and what was done to the scores.

    ``size`` is the scores' shape where masks met them; ``added_in`` the dtype that scores and bias were promoted to.
    """

    product: fx.Node
    scale: float = 1.0
    by: list[tuple[fx.Node, bool]] = field(default_factory=list)  # tensors that multiply queries, or divide
    bounded: bool = False
    cap: float | None = None
    bias: list[Part] = field(default_factory=list)
    hidden: list[Part] = field(default_factory=list)
    fill: float | None = None
    shut: list[Part] = field(default_factory=list)  # hidden by minus infinity before all that
    causal: bool = False
    sink: fx.Node | None = None
    sink_first: bool = False
    size: tuple[int, ...] = ()
    added_in: torch.dtype | None = None
    zero: bool = False  # a query that sees nothing gets 0, as what is no number was written over

    @property
    def masked(self) -> bool:
        """Whether scaling is over."""
        return bool(self.bias or self.hidden or self.shut or self.causal)


def scores_of(softmax: fx.Node) -> Written | None:
    """From the softmax back to the product of queries and keys; None where anything else is on the way."""
    top = _unshifted(softmax.args[0])
    start, sink, first = _beside(top)
    if start is None:
        return None
    readers = 2 if start is top and top is not softmax.args[0] else 1  # the maximum that was subtracted
    steps, node = [], start
    while isinstance(node, fx.Node) and node.target not in PRODUCTS:
        back = _step(node)
        if back is None or len(node.users) != readers:
            return None
        readers = 1
        steps.append((node, back))
        node = node.args[back]
    if not isinstance(node, fx.Node) or len(node.users) != readers or node.args[0] is node.args[1]:
        return None
    found = Written(node, sink=sink, sink_first=first, size=shape_of(start))
    for step, back in reversed(steps):  # from the product on
        if not _apply(found, step, back):
            return None
    return found if found.cap is not None or not found.bounded else None


def _unshifted(node: Any) -> Any:
    """Without a maximum that was subtracted: the softmax is the same, and what flows back through it adds up to 0."""
    if not isinstance(node, fx.Node) or node.target is not aten.sub.Tensor or node.kwargs:
        return node
    x, top = node.args
    while isinstance(top, fx.Node) and (top.target is aten.detach.default or _is_first(top)):
        top = top.args[0]
    if not isinstance(top, fx.Node) or top.target not in MAXIMA or top.args[0] is not x:
        return node
    dims: Any = top.args[1]
    last = {d % len(shape_of(x)) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}  # type: ignore[arg-type]
    alone = last == {len(shape_of(x)) - 1} and len(x.users) == 2  # type: ignore[arg-type,union-attr]
    return x if alone else node


def _is_first(node: fx.Node) -> bool:
    """The maxima of what returns their places, too."""
    return node.target is operator.getitem and node.args[1:] == (0,)


def _beside(node: Any) -> tuple[Any, fx.Node | None, bool]:
    """Scores, the one score that was joined to them along keys, and whether it stands first."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default:
        return node, None, False
    parts: Any = node.args[0]
    last = len(shape_of(node)) - 1
    if len(parts) != 2 or node.args[1] != last:
        return None, None, False
    first = shape_of(parts[0])[-1] == 1 and not _from_product(parts[0], shape_of(parts[0]))
    sink, scores = parts if first else parts[::-1]
    while sink.target is aten.expand.default:
        sink = sink.args[0]
    size = shape_of(sink)
    constant = sink.target is aten.full.default
    if len(size) > 1 and size[-1] == 1 and (size[-2] == 1 or constant) and len(size) == last + 1:
        return scores, sink, first
    return None, None, False


def _step(node: fx.Node) -> int | None:
    """Which argument of a step holds the scores; None for an op that attention does not have."""
    if node.target in (*LINEAR, *SCALING, *UNARY):
        return _place(node, (0, 1) if node.target in EITHER else (0,))
    return _place(node, (1, 2)) if node.target is aten.where.self else None


def _place(node: fx.Node, at: tuple[int, ...]) -> int | None:
    """The one argument that has the scores' shape and comes from a product."""
    size = shape_of(node)
    found = [i for i in at if isinstance(node.args[i], fx.Node) and _made(node, node.args[i], size)]
    return found[0] if len(found) == 1 else None


def _made(node: fx.Node, x: Any, size: tuple[int, ...]) -> bool:
    if node.target is aten.reshape.default:
        return shape_of(x)[-2:] == size[-2:] and _from_product(x, shape_of(x))
    return _from_product(x, size)


def _from_product(node: Any, size: tuple[int, ...]) -> bool:
    while isinstance(node, fx.Node) and node.op == "call_function" and shape_of(node) == size:
        if node.target in PRODUCTS:
            return True
        if node.target is aten.where.self:
            return any(_from_product(a, size) for a in node.args[1:] if isinstance(a, fx.Node))
        if node.target not in (*LINEAR, *SCALING, *UNARY):
            return False
        parts = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if node.target in EITHER and len(parts) == 2:
            return any(_from_product(a, size) for a in parts)
        node = parts[0]
        if node.target in (*PRODUCTS, *LINEAR, *SCALING, *UNARY, aten.where.self) and shape_of(node)[-2:] == size[-2:]:
            size = shape_of(node)
    return False


def _apply(found: Written, node: fx.Node, back: int) -> bool:
    """Take one step into ``found``; False where attention cannot say it."""
    if node.target is aten._to_copy.default:
        return (node.args[0].meta["spec"].dtype, node.meta["spec"].dtype) in WIDENING  # type: ignore[union-attr]
    if node.kwargs:
        return False
    if node.target is aten.reshape.default:
        return not found.by and not found.masked or _masks_follow(found, shape_of(node))
    if node.target is aten.tanh.default:
        ok = not (found.bounded or found.masked)
        found.bounded = True
        return ok
    if node.target in SCALING:
        return not found.masked and _scale(found, node, node.args[1 - back])
    if not found.masked:
        found.size = shape_of(node)
    if shape_of(node) != found.size or (found.bounded and found.cap is None):
        return False
    if node.target in LINEAR:
        return _add(found, node, node.args[1 - back])
    if node.target is aten.masked_fill.Scalar:
        return _hide(found, node.args[1], True, node.args[2])
    return _hide(found, node.args[0], back == 2, node.args[3 - back])


def _masks_follow(found: Written, size: tuple[int, ...]) -> bool:
    """Whether leading dims of masked scores are split, masks likewise, or split ones are merged again at the end."""
    if not found.masked or size[-2:] != found.size[-2:]:
        return False
    if len(size) <= len(found.size):
        return True
    lead = found.size[:-2]
    for parts in (found.bias, found.hidden, found.shut):
        for i, part in enumerate(parts):
            own = part.shape[:-2]
            if math.prod(own) == 1:
                continue
            if own != lead:
                return False
            parts[i] = replace(part, lead=size[:-2])
    found.size = size
    return True


def _scale(found: Written, node: fx.Node, other: Any) -> bool:
    """A number, or a tensor that is one number for every key; after a bound, the bound itself."""
    divides = node.target is aten.div.Tensor
    by = number(other)
    if by is None:
        ok = isinstance(other, fx.Node) and not found.bounded and other.meta["spec"].is_float
        if not ok or shape_of(other)[-1:] not in ((), (1,)) or shape_of(node) != shape_of(found.product):
            return False
        found.by.append((other, divides))
        return not shape_of(other) or other.meta["spec"].dtype == found.product.meta["spec"].dtype
    by = 1.0 / by if divides and by else by
    if found.bounded and found.cap is not None:
        return False
    if found.bounded:
        found.cap = by
    found.scale *= by
    return math.isfinite(found.scale) and found.scale != 0 and (found.cap is None or found.cap > 0)


def _add(found: Written, node: fx.Node, bias: Any) -> bool:
    """A bias; after a mask only where that hides by minus infinity. A bool one would add 1."""
    if not isinstance(bias, fx.Node) or not bias.meta["spec"].is_float or len(shape_of(bias)) < 2:
        return False
    if found.hidden and found.fill != -math.inf:
        return False
    found.bias.append(Part(bias, node.target is aten.sub.Tensor))
    found.added_in = node.meta["spec"].dtype
    return True


def _hide(found: Written, mask: Any, opposite: bool, by: Any) -> bool:
    """One more mask that hides by a number."""
    fill = number(by)
    if not isinstance(mask, fx.Node) or fill is None or len(shape_of(mask)) < 2:
        return False
    if not found.hidden or fill == found.fill:
        found.hidden.append(Part(mask, opposite))
    elif found.fill == -math.inf:
        found.shut, found.hidden = [*found.shut, *found.hidden], [Part(mask, opposite)]
    elif fill == -math.inf and seen_kind(mask, opposite) == "causal":
        found.causal = True
        return True
    else:
        return False
    found.fill = fill
    return True


def number(value: Any) -> float | None:
    """A number, or a tensor that is one number."""
    if isinstance(value, fx.Node):
        value = value.args[1] if value.target is aten.full.default else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
