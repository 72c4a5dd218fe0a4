"""Symbolic reading of integers and booleans that are made of iotas only. Nothing of a mask's size is ever built."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.program import Spec

aten = torch.ops.aten
VIEWS = (aten.unsqueeze.default, aten.reshape.default, aten.expand.default, aten.permute.default)
SIGNS = {  # comparison -> (sign, shift): x op y is sign (x - y) + shift >= 0
    "ge": (1, 0),
    "gt": (1, -1),
    "le": (-1, 0),
    "lt": (-1, -1),
}


@dataclass(frozen=True)
class Affine:
    """const + sum of coefficient times index, dims counted from the end (-1 is the last)."""

    terms: tuple[tuple[int, int], ...] = ()
    const: int = 0

    @staticmethod
    def of(terms: dict[int, int], const: int) -> "Affine":
        """From coefficients by dim; those that are zero go."""
        return Affine(tuple(sorted((d, c) for d, c in terms.items() if c)), const)

    def plus(self, other: "Affine", times: int = 1) -> "Affine":
        """self + times other."""
        terms = dict(self.terms)
        for d, c in other.terms:
            terms[d] = terms.get(d, 0) + times * c
        return Affine.of(terms, self.const + times * other.const)

    def lowest(self, shape: tuple[int, ...]) -> int:
        """Least value over every index of a tensor of this shape."""
        return self.const + sum(min(0, c * (shape[d] - 1)) for d, c in self.terms)

    @property
    def reduced(self) -> "Affine":
        """The smallest coefficients with which ``self >= 0`` says the same of integers."""
        g = math.gcd(*(c for _, c in self.terms)) or 1
        return Affine(tuple((d, c // g) for d, c in self.terms), self.const // g)

    def without(self, shape: tuple[int, ...]) -> "Affine":
        """Without the terms of dims of length 1."""
        return Affine(tuple((d, c) for d, c in self.terms if shape[d] != 1), self.const)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node that returns one tensor."""
    spec = node.meta["spec"]
    assert isinstance(spec, Spec)
    return spec.shape


def source_dims(node: fx.Node) -> dict[int, int] | None:
    """For a view, which dim of its input each of its dims reads (both from the end); dims of length 1 are left out.

    None where dims are merged or split.
    """
    x: Any = node.args[0]
    before, after = shape_of(x), shape_of(node)
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return {i - len(after): d - len(before) for i, d in enumerate(dims)}
    if node.target is aten.expand.default:
        return {d: d for d in range(-len(before), 0) if before[d] != 1}
    kept = [d - len(before) for d, n in enumerate(before) if n != 1]
    shown = [d - len(after) for d, n in enumerate(after) if n != 1]
    if [before[d] for d in kept] != [after[d] for d in shown]:
        return None
    return dict(zip(shown, kept))


def affine(value: Any) -> Affine | None:
    """The integer tensor or number as an affine function of its own index; None where it is none.

    No term is of a dim of length 1, and no value is outside of the dtype: integers that wrap around are none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return Affine((), value)
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    spec = value.meta["spec"]
    if not isinstance(spec, Spec) or spec.is_float:
        return None
    if spec.dtype == torch.bool:
        known = truth(value)
        return None if known is None else Affine((), int(known))
    found = _affine_call(value)
    return found.without(spec.shape) if found is not None and _fits(found, spec.shape, spec.dtype) else None


def _fits(values: Affine, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the dtype has every value over a shape."""
    least, most = values.lowest(shape), -Affine().plus(values, -1).lowest(shape)
    info = torch.iinfo(dtype)
    return info.min <= least and most <= info.max


def _affine_call(node: fx.Node) -> Affine | None:
    target, args = node.target, node.args
    if target is aten.arange.start_step:
        start, _, step = args
        ok = isinstance(start, int) and isinstance(step, int)
        return Affine.of({-1: step}, start) if ok else None  # type: ignore[dict-item,arg-type]
    if target is aten.full.default:
        return affine(args[1])
    if target is aten._to_copy.default:
        return affine(args[0])
    if target in VIEWS:
        return _moved(node)
    if target in (aten.slice.Tensor, aten.cat.default, aten.cumsum.default):
        return _along(node)
    if target is aten.neg.default:
        inner = affine(args[0])
        return Affine().plus(inner, -1) if inner is not None else None
    if target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        x, y = affine(args[0]), affine(args[1])
        return x.plus(y, 1 if target is aten.add.Tensor else -1) if x is not None and y is not None else None
    if target is aten.mul.Tensor:
        x, y = affine(args[0]), affine(args[1])
        if x is not None and y is not None and not (x.terms and y.terms):
            one, many = (x, y) if not x.terms else (y, x)
            return Affine().plus(many, one.const)
    return None


def _moved(node: fx.Node) -> Affine | None:
    inner, dims = affine(node.args[0]), source_dims(node)
    if inner is None or dims is None:
        return None
    size = shape_of(node.args[0])  # type: ignore[arg-type]
    coefficients = {d: c for d, c in inner.terms if size[d] != 1}
    return Affine.of({d: coefficients.get(s, 0) for d, s in dims.items()}, inner.const)


def _along(node: fx.Node) -> Affine | None:
    """A slice, a join or a running sum along one dim, where the result is affine again."""
    args: Any = node.args
    if node.target is aten.cat.default:
        return _joined(args[0], args[1] - len(shape_of(node)))
    inner = affine(args[0])
    if inner is None:
        return None
    d = args[1] - len(shape_of(node))
    if node.target is aten.cumsum.default:
        return Affine.of({d: inner.const}, inner.const) if not inner.without(shape_of(node)).terms else None
    step = args[4] if len(args) > 4 else 1
    terms = dict(inner.terms)
    slope = terms.pop(d, 0)
    return Affine.of({**terms, d: slope * step}, inner.const + slope * args[2])


def _joined(parts: list[fx.Node], d: int) -> Affine | None:
    """The one affine function that every part is a piece of; parts of length 1 fit any slope."""
    lines = [affine(p) for p in parts]
    if any(line is None for line in lines):
        return None
    pieces = [(line, shape_of(p)[d]) for line, p in zip(lines, parts) if line is not None]
    slope = next((dict(line.terms).get(d, 0) for line, n in pieces if n > 1), None)
    at, whole = 0, None
    for line, n in pieces:
        terms = dict(line.terms)
        mine = terms.pop(d, 0)
        if slope is None or (n > 1 and mine != slope):
            return None
        here = Affine.of({**terms, d: slope}, line.const - slope * at)
        if whole not in (None, here):
            return None
        whole, at = here, at + n
    return whole


def truth(node: fx.Node) -> bool | None:
    """True or False where a boolean tensor is that everywhere; None where it varies or is unknown."""
    known, size = conditions(node), shape_of(node)
    if known is None:
        return None
    if all(c.lowest(size) >= 0 for c in known):
        return True
    return False if any(negation(c).lowest(size) >= 0 for c in known) else None


def conditions(node: Any) -> list[Affine] | None:
    """The boolean tensor as a conjunction of ``affine >= 0``; None where it is none."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    target, args = node.target, node.args
    if target is aten.full.default:
        return [] if args[1] else [Affine((), -1)]
    if target in (aten.bitwise_and.Tensor, aten.logical_and.default):
        x, y = conditions(args[0]), conditions(args[1])
        return x + y if x is not None and y is not None else None
    if target in (aten.bitwise_not.default, aten.logical_not.default):
        inner = conditions(args[0])
        return [negation(inner[0])] if inner is not None and len(inner) == 1 else None
    if target in VIEWS:
        return _moved_conditions(node)
    name = getattr(target, "_schema", None) and target._schema.name.split("::")[1]  # type: ignore[union-attr]
    if name in SIGNS:
        apart, (sign, shift) = _difference(args), SIGNS[name]
        return [Affine((), shift).plus(apart, sign)] if apart is not None else None
    return _equality(name, args) if name in ("eq", "ne") else None


def _difference(args: Any) -> Affine | None:
    """x - y of what is compared; None where one is not affine, or wraps around in the dtype of the comparison."""
    x, y = (affine(a) for a in args)
    if x is None or y is None:
        return None
    sizes = [shape_of(a) if isinstance(a, fx.Node) else () for a in args]
    stand = [
        torch.empty(size, dtype=a.meta["spec"].dtype, device="meta") if isinstance(a, fx.Node) else a
        for a, size in zip(args, sizes)
    ]
    to = torch.result_type(*stand)
    fit = to == torch.bool or all(_fits(v, size, to) for v, size in zip((x, y), sizes))
    return x.plus(y, -1) if fit else None


def _equality(name: str, args: Any) -> list[Affine] | None:
    """x == y is x >= y and y >= x; x != y is a conjunction only where the difference is one number."""
    apart = _difference(args)
    if apart is None:
        return None
    if name == "eq":
        return [apart, Affine().plus(apart, -1)]
    sizes = torch.broadcast_shapes(*(shape_of(a) for a in args if isinstance(a, fx.Node)))
    return [Affine((), abs(apart.const) - 1)] if not apart.without(sizes).terms else None


def negation(condition: Affine) -> Affine:
    """not (f >= 0) is -f - 1 >= 0, of integers."""
    return Affine((), -1).plus(condition, -1)


def _moved_conditions(node: fx.Node) -> list[Affine] | None:
    inner, dims = conditions(node.args[0]), source_dims(node)
    if inner is None or dims is None:
        return None
    size = shape_of(node.args[0])  # type: ignore[arg-type]
    out = []
    for condition in inner:
        coefficients = {d: c for d, c in condition.terms if size[d] != 1}
        out.append(Affine.of({d: coefficients.get(s, 0) for d, s in dims.items()}, condition.const))
    return out


def element(value: Any, index: tuple[int, ...]) -> Any:
    """One element of a tensor that is made of iotas and constants, by following the ops themselves.

    ``index`` may be that of a shape that the tensor broadcasts to. Independent of ``affine``, as its check.
    """
    if not isinstance(value, fx.Node):
        return value
    size = shape_of(value)
    at = tuple(0 if n == 1 else i for i, n in zip(index[len(index) - len(size) :], size))
    target, args = value.target, value.args
    if target is aten.arange.start_step:
        return args[0] + args[2] * at[0]  # type: ignore[operator]
    if target is aten.full.default:
        return args[1]
    if target is aten.permute.default:
        dims: Any = args[1]
        return element(args[0], tuple(at[dims.index(d)] for d in range(len(dims))))
    if target in (aten.unsqueeze.default, aten.reshape.default):
        return element(args[0], _unravel(at, size, shape_of(args[0])))  # type: ignore[arg-type]
    if target is aten.expand.default:
        return element(args[0], at)
    if target is aten._to_copy.default:
        return _scalar(args[0], element(args[0], at)).to(value.meta["spec"].dtype).item()
    if target in (aten.slice.Tensor, aten.cat.default, aten.cumsum.default):
        return _element_along(value, list(at))
    return target(*(_scalar(a, element(a, at)) for a in args)).item()  # type: ignore[operator]


def _scalar(argument: Any, value: Any) -> Any:
    """One element as the 0-d tensor that stands for its tensor."""
    return (
        torch.tensor(value, dtype=argument.meta["spec"].dtype, device="cpu") if isinstance(argument, fx.Node) else value
    )


def _element_along(value: fx.Node, at: list[int]) -> Any:
    args: Any = value.args
    if value.target is aten.cat.default:
        for part in args[0]:
            n = shape_of(part)[args[1]]
            if at[args[1]] < n:
                return element(part, tuple(at))
            at[args[1]] -= n
    d = args[1]
    if value.target is aten.slice.Tensor:
        at[d] = args[2] + at[d] * (args[4] if len(args) > 4 else 1)
        return element(args[0], tuple(at))
    sampled = sorted({0, 1, at[d] // 2, at[d] - 1, at[d]} & set(range(at[d] + 1)))  # the sum of equal terms, sampled
    terms = {element(args[0], (*at[:d], i, *at[d + 1 :])) for i in sampled}
    return terms.pop() * (at[d] + 1) if len(terms) == 1 else math.nan


def _unravel(at: tuple[int, ...], size: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The index in shape ``other`` of the element at ``at`` in shape ``size``."""
    flat = sum(i * math.prod(size[d + 1 :]) for d, i in enumerate(at))
    return tuple(flat // math.prod(other[d + 1 :]) % n for d, n in enumerate(other))
