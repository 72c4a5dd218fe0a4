"""What a module computes for one choice of experts: floats have shapes only, integers are real.

A loop over experts asks which tokens chose which, which no symbolic trace can answer. Here the choice is given, so that
Python's control flow runs as it does for real, while weights and hidden states lie on the meta device and cost nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


class Unrecognized(Exception):
    """The module is no layer of experts that can be written as one op."""


OWN = {name: getattr(nn.Module, name) for name in ("__call__", "__getattr__")}


@contextmanager
def aside() -> Iterator[None]:
    """While the context lasts, modules run outside of the trace that is under way, which learns nothing of it."""
    traced = {name: getattr(nn.Module, name) for name in OWN}
    try:
        _set(OWN)
        with _disable_current_modes():
            yield
    finally:
        _set(traced)


def _set(methods: dict[str, Any]) -> None:
    for name, method in methods.items():
        setattr(nn.Module, name, method)


class Recorder(TorchDispatchMode):
    """Records the ops that read or make tensors on the meta device as a functional graph.

    Placeholders have ``meta["name"]`` for what was given by ``track``, and ``meta["value"]`` for a real tensor that an
    op read. Every node has ``meta["val"]``, what it returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.shared: dict[int, set[int]] = {}  # storage: tensors in it
        self.stale: set[int] = set()
        self.kept: list[Tensor] = []

    def track(self, x: Tensor, name: str) -> fx.Node:
        """Make ``x`` an input of the graph."""
        node = self.graph.placeholder(f"in_{len(self.kept)}")
        node.meta["name"] = name
        self._follow(x, node)
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        mutable = func._schema.is_mutable and any(t.is_meta for t in read)
        out = args[0] if mutable else _run(func, args, kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not any(t.is_meta for t in (*read, *made)):
            return out
        given_args, given_kwargs = tree_map_only(Tensor, self._node, (args, kwargs))
        if mutable:
            self._write(func, out, given_args, given_kwargs)
            return out
        node = self.graph.call_function(func, given_args, given_kwargs)
        node.meta["val"] = out
        if isinstance(out, Tensor):
            self._follow(out, node)
            return out
        for i, part in enumerate(out):
            if isinstance(part, Tensor):
                piece = self.graph.call_function(_getitem, (node, i))
                self._follow(part, piece)
        return out

    def _node(self, x: Tensor) -> fx.Node:
        """The node of a tensor; a real one becomes a constant of the graph."""
        if id(x) in self.stale:
            raise Unrecognized("a view of memory that was written to")
        if id(x) not in self.nodes:
            if x.is_meta:
                raise Unrecognized("a tensor whose origin was not seen")
            node = self.graph.placeholder(f"constant_{len(self.kept)}")
            node.meta["value"] = x.clone()
            self._follow(x, node)
        return self.nodes[id(x)]

    def _write(self, func: Any, target: Tensor, args: Any, kwargs: Any) -> None:
        """An op in place as its functional form; other views of the memory may not be read any more."""
        name = func._schema.name.split("::")[1].removesuffix("_")
        twin = getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)
        if twin is None or not target.is_meta:
            raise Unrecognized(f"{func} has no functional form here")
        self.stale |= self.shared[target.untyped_storage()._cdata] - {id(target)}
        node = self.graph.call_function(twin, args, kwargs)
        node.meta["val"] = target
        self.nodes[id(target)] = node

    def _follow(self, x: Tensor, node: fx.Node) -> None:
        self.kept.append(x)
        node.meta.setdefault("val", x)
        self.nodes[id(x)] = node
        self.shared.setdefault(x.untyped_storage()._cdata, set()).add(id(x))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's result; where it wants all tensors on one device, integers lend their shapes only."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        moved_args, moved_kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*moved_args, **moved_kwargs)


def _getitem(values: Any, index: int) -> Any:
    return values[index]
