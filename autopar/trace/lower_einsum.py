"""Sums of products of two tensors with heads, as ``matmul`` whose batch dims stay apart: so attention is written."""

import re
from typing import Any

from torch import fx

from autopar.trace.builder import Builder, aten, lowering, shape

HEADS = 4  # dims of a tensor that has heads


@lowering(aten.einsum.default)
def einsum(b: Builder, equation: str, operands: Any, **_: Any) -> Any:
    """``matmul`` where one dim is summed and the rest of the second tensor is one dim; else as torch composes it."""
    parsed = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", equation.replace(" ", ""))
    if parsed is not None and len(operands) == 2 and max(len(shape(x)) for x in operands) >= HEADS:
        left, right, out = parsed.groups()
        x, y = operands
        if out[-1] not in right:
            left, right, x, y = right, left, y, x
        if _fits(left, right, out) and all(_sizes(x, left)[n] == _sizes(y, right)[n] for n in set(left) & set(right)):
            return _product(b, (left, right, out), x, y)
    flat = list(operands)
    return b.inline(lambda *tensors: aten.einsum.default(equation, list(tensors)), *flat)


def _sizes(x: fx.Node, names: str) -> dict[str, int]:
    return dict(zip(names, shape(x), strict=True))


def _fits(left: str, right: str, out: str) -> bool:
    """Whether one name is summed, one is the second tensor's alone, and each name stands once in what has it."""
    summed = set(left) & set(right) - set(out)
    alone = set(right) - set(left)
    once = all(len(set(names)) == len(names) for names in (left, right, out))
    known = set(out) == (set(left) | set(right)) - summed
    return once and known and len(summed) == 1 and alone == {out[-1]} and bool(set(left) & set(right) & set(out))


def _product(b: Builder, names: tuple[str, str, str], x: fx.Node, y: fx.Node) -> fx.Node:
    left, right, out = names
    (summed,) = set(left) & set(right) - set(out)
    batch = [n for n in out if n in left and n in right]
    ready = left[-1] == summed and list(left[: len(batch)]) == batch  # nothing moves: its own order of rows
    rows = [n for n in (left if ready else out) if n in left and n not in right]
    first = b.permute(x, [left.index(n) for n in (*batch, *rows, summed)])
    second = b.permute(y, [right.index(n) for n in (*batch, summed, out[-1])])
    if not rows:
        size = shape(first)
        first = b.reshape(first, (*size[:-1], 1, size[-1]))
    if len(rows) > 1:
        size = shape(second)
        second = b.reshape(second, (*size[: len(batch)], *(1 for _ in rows[1:]), *size[len(batch) :]))
    made = b.emit(aten.matmul.default, first, second)
    if not rows:
        size = shape(made)
        made = b.reshape(made, (*size[:-2], size[-1]))
    order = [*batch, *rows, out[-1]]
    return b.permute(made, [order.index(n) for n in out])
