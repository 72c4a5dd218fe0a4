"""A backward in two parts: gradients of a stage's inputs now, those of its weights later (Qi et al., arXiv:2401.10241).

Nodes of the graph that lead to an input are *inner*. The first part runs these, and notes what arrives at each inner
node from which a way leads to weights past the others. The second part starts at those nodes. Weights that share such a
node are done together; then what one sends another on its way is overruled by what was noted.

torch.distributed.pipelining has two such halves, too; they leave out weights that meet no inner node, and count twice
those whose groups overlap.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from autopar.emit.owned import owned

Node = Any  # of autograd


@dataclass(eq=False)
class _Group:
    """Weights, the inner nodes where the second part starts for them, and the outer roots."""

    weights: dict[Node, Tensor]
    starts: set[Node]
    roots: set[int]


@dataclass
class Rest:
    """What is left of a backward.

    Args:
        given: the roots and their gradients.
        arrived: the gradients of the results of each inner node where the second part starts.
    """

    groups: list[_Group]
    given: list[tuple[GradientEdge, Tensor]]
    arrived: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)

    def run(self) -> None:
        """Add the weights' gradients to their ``.grad``."""
        for group in self.groups:
            self._run(group)
        self.groups, self.given, self.arrived = [], [], {}

    def _run(self, group: _Group) -> None:
        known = {n: self.arrived[n] for n in group.starts if n in self.arrived}
        pairs = [(GradientEdge(n, i), g) for n, grads in known.items() for i, g in enumerate(grads) if g is not None]
        pairs += [self.given[i] for i in sorted(group.roots)]
        if not pairs:
            return
        hooks = [node.register_prehook(partial(_overruled, grads)) for node, grads in known.items()]
        try:
            weights = list(group.weights.values())
            edges, grads = [e for e, _ in pairs], [g for _, g in pairs]
            # The graph is kept: ways of several groups may cross.
            found = torch.autograd.grad(edges, weights, grads, retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        first = [None if isinstance(g, DTensor) or w.grad is not None else g for w, g in zip(weights, found)]
        for weight, grad, own in zip(weights, found, owned(first)):
            if grad is not None:
                weight.grad = (grad if own is None else own) if weight.grad is None else weight.grad + grad


def _overruled(noted: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return noted


def _noted(arrived: dict[Node, tuple[Tensor | None, ...]], node: Node, grads: tuple[Tensor | None, ...]) -> None:
    # Tensors of our own, so that it can be seen that their memory has another reader.
    arrived[node] = tuple(None if g is None else g.detach() for g in grads)


def backward_inputs(roots: list[Tensor], grads: list[Tensor], leaves: list[Tensor]) -> Rest:
    """Leave the gradients of ``leaves`` in their ``.grad``; the rest comes back.

    Args:
        roots: values that take a gradient, none of them a view. grads: of each.
    """
    edges = [get_gradient_edge(r) for r in roots]
    inner = _inner([e.node for e in edges], {get_gradient_edge(leaf).node for leaf in leaves})
    rest = Rest(_groups(edges, inner), list(zip(edges, grads)))
    starts = set[Node]().union(*(g.starts for g in rest.groups))
    hooks = [node.register_prehook(partial(_noted, rest.arrived, node)) for node in starts]
    try:
        found = torch.autograd.grad(roots, leaves, grads, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for leaf, grad in zip(leaves, found):
        leaf.grad = grad
    return rest


def _walk(starts: Iterable[Node]) -> Iterator[Node]:
    seen, todo = set(), list(starts)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += _next(node)


def _next(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions if n is not None]


def _inner(starts: list[Node], ends: set[Node]) -> set[Node]:
    """The nodes from which a way leads to ``ends``."""
    into: dict[Node, list[Node]] = {}
    for node in _walk(starts):
        for after in _next(node):
            into.setdefault(after, []).append(node)
    found, todo = set(), list(ends)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += into.get(node, [])
    return found


def _groups(edges: list[GradientEdge], inner: set[Node]) -> list[_Group]:
    """Weights with the nodes from which they are reached past inner ones; those that share any are one group."""
    groups: list[_Group] = []
    found = [_Group(_weights([e.node]), set(), {i}) for i, e in enumerate(edges) if e.node not in inner]
    for node in _walk(e.node for e in edges):
        if node in inner:
            found.append(_Group(_weights(n for n in _next(node) if n not in inner), {node}, set()))
    for group in (g for g in found if g.weights):
        same = [g for g in groups if g.weights.keys() & group.weights.keys()]
        for other in same:
            group = _Group({**other.weights, **group.weights}, other.starts | group.starts, other.roots | group.roots)
        groups = [*(g for g in groups if g not in same), group]
    return groups


def _weights(starts: Iterable[Node]) -> dict[Node, Tensor]:
    """The leaves that can be reached, by their accumulators."""
    return {n: n.variable for n in _walk(starts) if hasattr(n, "variable")}
