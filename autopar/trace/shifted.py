"""Losses of a part of the positions become losses of all, of which the others do not count.

``cross_entropy(logits[:, :-1], labels[:, 1:])`` is how models shift labels. A cut of a sequence that ranks share out
leaves them uneven runs, or none; labels that are ignored give the same sum and leave the logits as they lie.
"""

import math
from typing import Any

import torch
from torch import fx

from autopar.ir import edit, ops
from autopar.rules.arguments import arguments
from autopar.trace.affine import shape_of

aten = torch.ops.aten


def count_no_others(graph: fx.Graph) -> None:
    """Rewrite every summed loss whose logits are a slice that nothing else reads."""
    for node in graph.find_nodes(op="call_function", target=ops.token_loss):
        known = arguments(node)
        cut, summed = _cut_of(known["logits"]), _sum_of(node)
        if cut is None or summed is None:
            continue
        with graph.inserting_before(summed):
            made = _whole(graph, node, cut, known)
            wide = summed.meta["spec"].dtype
            if made.meta["spec"].dtype != wide:
                made = edit.call(graph, aten._to_copy.default, (made,), {"dtype": wide}, like=summed)
            every = list(range(len(shape_of(made))))
            edit.replace(summed, edit.call(graph, aten.sum.dim_IntList, (made, every, False), like=summed))
    edit.drop_dead(graph)


def _sum_of(node: fx.Node) -> fx.Node | None:
    """The sum of all losses, of the same or a wider type, where nothing else reads them."""
    last = node
    while len(last.users) == 1:
        (reader,) = last.users
        if reader.target is aten.sum.dim_IntList:
            all_of = not reader.kwargs and reader.args[1:] == (list(range(len(shape_of(node)))), False)
            return reader if all_of else None
        if reader.target is not aten._to_copy.default or last is not node:
            return None
        last = reader
    return None


def _cut_of(logits: fx.Node) -> fx.Node | None:
    """The slice of positions behind logits [.., V], their leading dims merged or not, classes moved away and back."""
    x: Any = logits
    order = list(range(len(shape_of(x))))
    if x.target is aten.reshape.default and len(x.users) == 1:
        x, order = x.args[0], []
    while isinstance(x, fx.Node) and x.target is aten.permute.default and order and len(x.users) == 1:
        x, order = x.args[0], [x.args[1][d] for d in order]
    if not isinstance(x, fx.Node) or x.target is not aten.slice.Tensor or len(x.users) != 1 or len(x.args) != 4:
        return None
    same = shape_of(x)[-1] == shape_of(logits)[-1] and order == sorted(order)
    return x if same and x.args[1] != len(shape_of(x)) - 1 else None


def _whole(graph: fx.Graph, node: fx.Node, cut: fx.Node, known: dict[str, Any]) -> fx.Node:
    """The loss of all positions."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return edit.call(graph, target, args, kwargs, like=node)

    x, dim, start, end = cut.args
    assert isinstance(x, fx.Node) and isinstance(dim, int) and isinstance(start, int) and isinstance(end, int)
    part, size, kind = shape_of(cut)[:-1], shape_of(x)[:-1], known["target"].meta["spec"].dtype
    labels = call(aten.reshape.default, known["target"], list(part))
    pieces = [(start, None), (end - start, labels), (size[dim] - end, None)]
    around = [
        labels or call(aten.full.default, [*size[:dim], n, *size[dim + 1 :]], known["ignore_index"], dtype=kind)
        for n, labels in pieces
        if n
    ]
    labels = call(aten.cat.default, around, dim)
    if len(shape_of(known["logits"])) != len(size) + 1:
        x = call(aten.reshape.default, x, [math.prod(size), shape_of(x)[-1]])
        labels = call(aten.reshape.default, labels, [math.prod(size)])
    return call(ops.token_loss, x, labels, known["ignore_index"])
