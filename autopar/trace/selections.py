"""Rows and elements that move without being computed with: which of a value's they are in what is made of it."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from autopar.trace.witness import aten

Casts = tuple[torch.dtype, ...]
SELECTIONS = {
    aten.index.Tensor, aten.index_select.default, aten.select.int, aten.slice.Tensor, aten.view.default,
    aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.expand.default, aten.permute.default, aten.t.default, aten.transpose.int,
    aten.flatten.using_ints,
}  # fmt: skip
VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints,
}  # fmt: skip
CASTS = (aten._to_copy.default, aten.to.dtype)
COPIES = (aten.clone.default, aten.alias.default, aten.lift_fresh.default)
PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default}


def leading(node: fx.Node) -> tuple[int, ...]:
    """The dims that are rows."""
    return tuple(node.meta["val"].shape[:-1])


def numbers_of(shape: tuple[int, ...]) -> Tensor:
    """Every element's number."""
    return torch.arange(int(torch.Size(shape).numel())).view(shape)


def moved(node: fx.Node, numbers: Tensor, narrow: bool) -> Tensor | None:
    """``numbers`` of the elements of what a selection reads, selected likewise.

    ``narrow``: the last dim, of size 1 in ``numbers``, must be left alone.
    """
    after = node.meta["val"].shape
    want = torch.Size((*after[:-1], 1)) if narrow else after
    args: list[Any] = list(fx.map_arg(list(node.args), lambda n: n if n is node.args[0] else n.meta.get("number")))
    args[0] = numbers
    before = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    if narrow and (not before or not after or before[-1] != after[-1]):
        return None
    try:
        target: Any = node.target
        if node.target in VIEWS or node.target is aten.expand.default:
            out = numbers.reshape(want) if node.target in VIEWS else numbers.expand(want)
        else:
            out = target(*args)
    except (RuntimeError, IndexError, TypeError):
        return None
    return out if out.shape == want else None


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a value."""
    found: torch.dtype = node.meta["val"].dtype
    return found


def same(node: fx.Node) -> bool:
    """Whether a value is copied, or cast among floats or among integers."""
    if node.target in CASTS:
        old, new = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
        return old.is_floating_point == new.is_floating_point and (old == torch.bool) == (new == torch.bool)
    return node.target in COPIES


def selected(node: fx.Node, narrow: bool = True) -> tuple[fx.Node, Tensor, Casts]:
    """What a chain of selections starts from, the number of its row (or element) at each of the node's, and casts.

    Casts are the float dtypes that it is cast to on the way, one after the other.
    """
    steps, casts = [], list[torch.dtype]()
    while True:
        if same(node):
            before: Any = node.args[0]
            casts += [dtype_of(node)] if dtype_of(node) != dtype_of(before) else []
            node = before
            continue
        maker: Any = node.args[0] if node.target is operator.getitem else None
        if maker is not None and maker.target in PARTS:
            split, source = maker, maker.args[0]
        elif node.target in SELECTIONS:
            split, source = None, node.args[0]
        else:
            break
        shape = source.meta["val"].shape
        numbers = numbers_of((*shape[:-1], 1) if narrow else tuple(shape))
        if split is None:
            made = moved(node, numbers, narrow)
        else:
            made = _part(split, numbers, node.args[1], narrow)  # type: ignore[arg-type]
        if made is None:
            break
        steps.append(made.reshape(-1))
        node = source
    places = torch.arange(torch.Size(leading(node) if narrow else node.meta["val"].shape).numel())
    for step in reversed(steps):
        places = places[step]
    return node, places, tuple(c for c in reversed(casts) if c.is_floating_point)


def whole_of(node: fx.Node) -> str | None:
    """The name of the input that a value is, element by element; None where it is none."""
    source, places, _ = selected(node, narrow=False)
    every = torch.equal(places, torch.arange(source.meta["val"].numel()))
    return source.meta.get("name") if every and source.op == "placeholder" else None


def selectors(node: fx.Node, source: fx.Node) -> frozenset[fx.Node]:
    """The values by which a chain of selections chooses, from ``source`` to ``node``."""
    found = set[fx.Node]()
    while node is not source:
        before: Any = node.args[0]
        found |= {n for n in node.all_input_nodes if n is not before}
        node = before
    return frozenset(found)


def _part(split: fx.Node, numbers: Tensor, index: int, narrow: bool) -> Tensor | None:
    dim = split.args[2] if len(split.args) > 2 else 0
    if split.target is aten.unbind.int:
        dim = split.args[1] if len(split.args) > 1 else 0
    if narrow and dim % numbers.ndim == numbers.ndim - 1:  # type: ignore[operator]
        return None
    target: Any = split.target
    parts: list[Tensor] = target(numbers, *split.args[1:])
    return parts[index]


def by_mask(node: fx.Node) -> bool:
    """Whether elements are taken by a mask: how many depends on its values."""
    if node.target is not aten.index.Tensor:
        return False
    indices: Any = node.args[1]
    return any(i is not None and i.meta["val"].dtype == torch.bool for i in indices)
