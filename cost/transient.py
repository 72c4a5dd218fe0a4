"""Bytes that a backward needs for a moment: gradients of activations, beyond what the forward has kept.

A walk from the last op to the first, as autograd does it: an op takes the gradient of its result, makes one for each
input that takes one, and lets go of what it alone had kept. Views hand on the same memory; a second gradient of a value
is added into the first. The fullest moment is chosen at a point of usual sizes, and given as an expression.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import fx

from autopar.cost.compute import Shapes, differentiable, is_view, op_name
from autopar.cost.memory import moves_nothing, saved, storage
from autopar.cost.polynomials import Polynomials
from autopar.cost.shares import layouts
from autopar.cost.symbols import Number
from autopar.ir import ops
from autopar.ir.program import tensor_args

USUAL: Mapping[str, float] = {"b": 4.0, "s": 1024.0, "tp": 2.0, "cp": 1.0, "ep": 1.0, "dp": 2.0, "pp": 1.0}
_POINT = {k: np.array([v]) for k, v in USUAL.items()}
_SAME = ("add", "sub", "to", "_to_copy", "clone")


def transient(nodes: Sequence[fx.Node], shapes: Shapes, split: bool = True) -> Number:
    """Bytes at the fullest moment of a backward through ``nodes`` of one graph, less those kept at its start.

    Parameters' gradients are not counted: they stay. ``split``: whether sharded classes lie on several ranks.
    """
    walk = _Walk(nodes, shapes, split)
    walk.run()
    return walk.most


class _Walk:
    """Gradients alive as buffers: a node that owns the size, and how many values share it."""

    def __init__(self, nodes: Sequence[fx.Node], shapes: Shapes, split: bool) -> None:
        self.nodes = [n for n in nodes if n.op == "call_function"]
        self.inside, self.shapes, self.split = set(self.nodes), shapes, split
        every = [*dict.fromkeys(m for n in self.nodes for m in (n, *n.all_input_nodes) if m.op != "call_module")]
        self.bytes: dict[fx.Node, Number] = {n: sum(v.bytes for v in shapes(n) if v is not None) for n in every}
        values = Polynomials.of(list(self.bytes.values()))(_POINT)
        self.size = dict(zip(self.bytes, (float(v[0]) for v in values)))
        self.buffer: dict[fx.Node, int] = {}  # of the gradient of each value
        self.owner: list[fx.Node] = []
        self.shared: list[int] = []
        self.savers: dict[fx.Node, int] = {}
        for n in self.nodes:
            for s in self._kept(n):
                self.savers[s] = self.savers.get(s, 0) + 1
        self.freed: list[tuple[Number, float]] = []
        self.highest, self.most = 0.0, 0  # type: float, Number

    def _kept(self, node: fx.Node) -> set[fx.Node]:
        """What is made inside and kept by the node."""
        return {s for v in saved(node, self.shapes).values if (s := storage(v)) in self.inside}

    def run(self) -> None:
        """The whole backward."""
        for node in reversed(self.nodes):
            made = op_name(node) != "getitem" or node.args[0] in self.inside
            if made and differentiable(node) and any(u not in self.inside for u in node.users):
                self.buffer[node] = self._new(node)
                self._look()
        for node in reversed(self.nodes):
            if node in self.buffer:
                self._backward(node)
            for value in self._kept(node):
                self.savers[value] -= 1
                if not self.savers[value]:
                    self.freed.append((self.bytes[value], self.size[value]))
            own = saved(node, self.shapes).extra
            if own != 0:
                self.freed.append((own, float(Polynomials.of([own])(_POINT)[0, 0])))

    def _backward(self, node: fx.Node) -> None:
        given = self.buffer.pop(node)
        if op_name(node) == "getitem":
            self._item(node, given)
            return
        inputs = [n for n in tensor_args(node) if differentiable(n)]
        if self._passes(node):
            self._give(inputs[0], given) if inputs else self._drop(given)
            return
        made = []
        for n in inputs:
            same = op_name(node) in _SAME and self.size.get(n) == self.size[node]
            made.append((n, given if same else self._new(n)))
            self.shared[given] += same
        self._look(self._inner(node))
        for n, buffer in made:
            self._give(n, buffer)
        self._drop(given)

    def _item(self, node: fx.Node, given: int) -> None:
        """One result of several: their gradients lie together."""
        source = node.args[0]
        if isinstance(source, fx.Node) and source in self.inside:
            if source not in self.buffer:
                self.buffer[source] = self._new(source)
                self._look()
            self._drop(given)

    def _passes(self, node: fx.Node) -> bool:
        """Whether the gradient of the input is that of the result."""
        if op_name(node) in ("expand", "slice", "select"):
            return False
        return (is_view(node) and self.size.get(tensor_args(node)[0]) == self.size[node]) or moves_nothing(node)

    def _inner(self, node: fx.Node) -> list[fx.Node]:
        """Values of an input's size that the op's backward needs besides its result."""
        if node.target is not ops.token_loss:
            return []
        logits = tensor_args(node)[0]
        rank = len(self.shapes(logits)[0].shape)  # type: ignore[union-attr]
        split = self.split and any(shard.dim == rank - 1 for _, shard in layouts(logits)[0].shards())
        return [logits] * (2 if split else 1)

    def _give(self, node: fx.Node, buffer: int) -> None:
        """Hand a gradient to a value; what comes from outside the graph keeps it, a parameter as its own."""
        if "param" in node.meta:
            self._drop(buffer)
        elif node in self.buffer:
            kept = self.buffer[node]
            if self.shared[kept] > 1:
                self.shared[kept] -= 1
                self.buffer[node] = self._new(node)
                self._look()
            self._drop(buffer)
        else:
            self.buffer[node] = buffer

    def _new(self, node: fx.Node) -> int:
        self.owner.append(node)
        self.shared.append(0 if "param" in node.meta else 1)
        return len(self.owner) - 1

    def _drop(self, buffer: int) -> None:
        self.shared[buffer] = max(0, self.shared[buffer] - 1)

    def _look(self, inner: Sequence[fx.Node] = ()) -> None:
        """Whether this moment is the fullest so far."""
        alive = [n for n, count in zip(self.owner, self.shared) if count]
        more = [*alive, *inner]
        total = sum(self.size.get(n, 0.0) for n in more) - sum(size for _, size in self.freed)
        if total > self.highest:
            self.highest = total
            self.most = sum(self.bytes.get(n, 0) for n in more) - sum(number for number, _ in self.freed)
