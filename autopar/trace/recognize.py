"""Attention masks that depend on no input: causal ones become ``is_causal``, full ones go."""

import math
from typing import Any

import torch
from torch import fx

from autopar.ir import ops
from autopar.ir.program import Spec
from autopar.rules.arguments import arguments
from autopar.trace.affine import Affine, conditions, element, negation, shape_of

aten = torch.ops.aten
LARGEST = 64  # ops of a mask that is compared with others
CAUSAL = Affine(((-2, 1), (-1, -1)), 0)  # query index - key index >= 0


def recognize_masks(graph: fx.Graph) -> None:
    """Every attention whose mask is causal or full says so, and takes no mask."""
    kinds: dict[Any, str] = {}  # by what computes the mask: layers make theirs alike
    for node in graph.find_nodes(op="call_function", target=ops.attention):
        q, k, v, mask, dropout, is_causal, *rest = node.args
        if mask is None or is_causal or arguments(node)["fill"] is not None:  # written out: looked at there
            continue
        made = computation(mask)
        if made not in kinds:
            kinds[made] = mask_kind(mask)
        kind = kinds[made]
        if kind == "full" or (kind == "causal" and shape_of(q)[-2] == shape_of(k)[-2]):
            node.args = (q, k, v, None, dropout, kind == "causal", *rest)


def computation(node: fx.Node) -> Any:
    """What nodes share that compute the same from the same placeholders; the node itself where that takes many ops."""
    cone = {node}
    rest = [node]
    while rest and len(cone) <= LARGEST:
        new = [n for n in rest.pop().all_input_nodes if n not in cone]
        cone.update(new)
        rest += new
    if rest:
        return node
    made: dict[fx.Node, Any] = {}
    for n in sorted(cone):
        made[n] = n if n.op == "placeholder" else (n.target, _alike((n.args, n.kwargs), made))
    return made[node]


def _alike(value: Any, made: dict[fx.Node, Any]) -> Any:
    """Arguments with what nodes compute in their place, other values with their types; hashable."""
    if isinstance(value, fx.Node):
        return made[value]
    if isinstance(value, dict):
        return ("dict", *((k, _alike(v, made)) for k, v in value.items()))
    if isinstance(value, (tuple, list)):
        return ("tuple", *(_alike(v, made) for v in value))
    return (type(value), repr(value))


def mask_kind(mask: fx.Node) -> str:
    """What the mask is: "causal", "full" or "" for anything else."""
    return _kind(mask, *seen_where(mask))


def seen_kind(mask: fx.Node, hidden: bool) -> str:
    """``mask_kind`` of a bool mask that says what is seen, or what is ``hidden``."""
    seen = conditions(mask)
    return _kind(mask, _opposite(seen) if hidden else seen, not hidden)


def _kind(mask: fx.Node, seen: list[Affine] | None, shown: Any) -> str:
    size = shape_of(mask)
    if seen is None or len(size) < 2:
        return ""
    left = {c.reduced for c in seen if c.lowest(size) < 0}
    kind = "full" if not left else "causal" if left == {CAUSAL} else ""
    return kind if kind and _confirmed(mask, size, kind, shown) else ""


def seen_where(mask: fx.Node) -> tuple[list[Affine] | None, Any]:
    """When an entry of the mask is seen (a conjunction), and the element that stands for it (True, or 0.0 if added)."""
    spec = mask.meta["spec"]
    assert isinstance(spec, Spec)
    if spec.dtype == torch.bool:
        return conditions(mask), True
    while mask.target in (aten.expand.default, aten._to_copy.default):
        mask = mask.args[0]  # type: ignore[assignment]
    if mask.target is aten.full.default:
        return ([] if mask.args[1] == 0 else None), 0.0
    return _added(mask), 0.0


def _added(mask: fx.Node) -> list[Affine] | None:
    """When an entry of a mask that is added is seen."""
    found = seen_parts(mask)
    if found is None:
        return None
    test, hidden, _ = found
    return _opposite(conditions(test)) if hidden else conditions(test)


def seen_parts(mask: fx.Node) -> tuple[fx.Node, bool, float] | None:
    """``where(seen, 0, lowest)``, ``where(hidden, lowest, 0)`` or ``masked_fill(0, hidden, lowest)``.

    Returns the bool value, whether it says what is hidden, and the number that hides.
    """
    args: Any = mask.args
    if mask.target is aten.where.self:
        test, yes, no = args
        if _is_zero(yes) and _hides(no, mask):
            return test, False, float(_constant(no))
        if _hides(yes, mask) and _is_zero(no):
            return test, True, float(_constant(yes))
    if mask.target is aten.masked_fill.Scalar and _is_zero(args[0]) and _hides(args[2], mask):
        return args[1], True, float(_constant(args[2]))
    return None


def _opposite(hidden: list[Affine] | None) -> list[Affine] | None:
    return [negation(hidden[0])] if hidden is not None and len(hidden) == 1 else None


def _constant(value: Any) -> Any:
    return value.args[1] if isinstance(value, fx.Node) and value.target is aten.full.default else value


def _is_zero(value: Any) -> bool:
    constant = _constant(value)
    return isinstance(constant, (int, float)) and constant == 0


def _hides(value: Any, mask: fx.Node) -> bool:
    """Minus infinity, or the dtype's lowest: nothing is left of an entry by the softmax where another one is seen."""
    constant = _constant(value)
    spec = mask.meta["spec"]
    if not isinstance(constant, (int, float)) or not spec.is_float:
        return False
    return constant == -math.inf or constant <= torch.finfo(spec.dtype).min * 0.99


def _confirmed(mask: fx.Node, size: tuple[int, ...], kind: str, shown: Any) -> bool:
    """Whether the ops themselves give what was recognized, on sampled rows: around the diagonal and at both ends."""
    rows = sorted({0, 1, size[-2] // 3, size[-2] // 2, size[-2] - 2, size[-2] - 1} & set(range(size[-2])))
    for q in rows:
        columns = {0, 1, q - 1, q, q + 1, q // 2, (q + size[-1]) // 2, size[-1] - 1} & set(range(size[-1]))
        for k in columns:
            value = element(mask, (*(n - 1 for n in size[:-2]), q, k))
            if (value == shown) != (kind == "full" or k <= q):
                return False
    return True
