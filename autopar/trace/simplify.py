"""Rewrites of a normalized graph: what is the same is computed once, and disguised views are views."""

import operator

import torch
from torch import fx

from autopar.ir import edit
from autopar.ir.program import Spec
from autopar.trace.builder import element_of
from autopar.trace.mask_parts import take_masks_apart
from autopar.trace.recognize import recognize_masks
from autopar.trace.recognize_attention import recognize_attention
from autopar.trace.shifted import count_no_others

aten = torch.ops.aten


def simplify(graph: fx.Graph, apart: bool = False) -> None:
    """All rewrites, in order. Needs ``meta["diff"]``; nodes that it adds have none.

    Args:
        apart: for a sequence that is shared out: say of masks what they are made of, and take losses of all positions.
    """
    drop_idle_detach(graph)
    edit.merge_equal(graph, scope=lambda n: n.meta.get("call"))
    slices_to_split(graph)
    recognize_attention(graph)
    recognize_masks(graph)
    if apart:
        take_masks_apart(graph)
        count_no_others(graph)
    edit.drop_dead(graph)


def drop_idle_detach(graph: fx.Graph) -> None:
    """A detach of what carries no gradient anyway is nothing."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        if not node.args[0].meta["diff"]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def slices_to_split(graph: fx.Graph) -> None:
    """Slices of one value that partition a dim become one ``split_with_sizes``."""
    for value in list(graph.nodes):
        groups: dict[tuple[int, str], list[fx.Node]] = {}
        for user in value.users:
            if user.target is aten.slice.Tensor and user.args[0] is value and len(user.args) == 4:
                groups.setdefault((user.args[1], element_of(user.meta.get("call"))), []).append(user)
        for (dim, _), cuts in groups.items():
            _split(graph, value, dim, cuts)


def _split(graph: fx.Graph, value: fx.Node, dim: int, cuts: list[fx.Node]) -> None:
    bounds: list[tuple[int, int]] = sorted({c.args[2:4] for c in cuts})  # type: ignore[misc]
    size = value.meta["spec"].shape
    ends = [0, *(e for _, e in bounds)]
    if len(bounds) < 2 or [s for s, _ in bounds] != ends[:-1] or ends[-1] != size[dim]:
        return
    first = min(cuts)
    lengths = [end - start for start, end in bounds]
    specs = tuple(Spec((*size[:dim], n, *size[dim + 1 :]), value.meta["spec"].dtype) for n in lengths)
    with graph.inserting_before(first):
        whole = edit.call(graph, aten.split_with_sizes.default, (value, lengths, dim), like=first, spec=specs)
        parts = [edit.call(graph, operator.getitem, (whole, i), like=first, spec=s) for i, s in enumerate(specs)]
    for cut in cuts:
        edit.replace(cut, parts[bounds.index(cut.args[2:4])])  # type: ignore[arg-type]
