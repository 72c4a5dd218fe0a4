"""Builds the normalized graph: one op at a time, each brought to the form that the rules know."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from autopar.ir import edit
from autopar.ir.program import Spec

Lowering = Callable[..., Any]
L = TypeVar("L", bound=Lowering)
LOWERINGS: dict[Any, Lowering] = {}
aten = torch.ops.aten
ELEMENT = re.compile(r"(?:[^.]+\.)*?\d+(?:@\d+)?(?=\.|$)")


def lowering(*targets: Any) -> Callable[[L], L]:
    """Register how ops are brought to normal form: ``f(builder, *args, **kwargs)`` gives the result's node or nodes."""

    def register(function: L) -> L:
        LOWERINGS.update(dict.fromkeys(targets, function))
        return function

    return register


def shape(x: fx.Node) -> tuple[int, ...]:
    """Global shape of a node."""
    spec = x.meta["spec"]
    assert isinstance(spec, Spec)
    return spec.shape


def dtype(x: fx.Node) -> torch.dtype:
    """Dtype of a node."""
    spec = x.meta["spec"]
    assert isinstance(spec, Spec)
    return spec.dtype


def broadcast(*shapes: Any) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to."""
    return tuple(torch.broadcast_shapes(*shapes))


def positive(dim: int, ndim: int) -> int:
    """``dim`` counted from the front."""
    return dim % max(ndim, 1)


def dims_of(dim: Any, ndim: int) -> list[int]:
    """``dim`` (None, int, or list) as a sorted list of dims counted from the front; none and [] mean all."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    return sorted(positive(d, ndim) for d in ([dim] if isinstance(dim, int) else dim))


def element_of(call: str | None) -> str:
    """The outermost element of a list that a call path is in: "layers.3" of "layers.3.attn"."""
    found = ELEMENT.match(call or "")
    return found[0] if found else ""


class Builder:
    """The graph under construction, and the node of the exported graph that is being lowered."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.like: fx.Node | None = None
        self.keys = 0
        self.params: dict[str, fx.Node] = {}
        self.constants: list[tuple[Tensor, fx.Node]] = []

    def key(self) -> int:
        """A number that tells this graph's random draws apart."""
        self.keys += 1
        return self.keys

    def placeholder(self, name: str, spec: Spec, **meta: Any) -> fx.Node:
        """A placeholder named after a path."""
        node = self.graph.placeholder(re.sub(r"\W", "_", name))
        node.meta = {**meta, "spec": spec}
        return node

    def constant(self, value: Tensor) -> fx.Node | None:
        """The placeholder of a constant that equals ``value``, if there is one."""
        for other, node in self.constants:
            alike = other.dtype == value.dtype and other.shape == value.shape and other.device == value.device
            if alike and not value.is_meta and torch.equal(other, value):
                return node
        return None

    def here(self, x: fx.Node) -> bool:
        """Whether ``x`` was made in the layer being lowered: rewrites across layers would make equal ones differ."""
        return self.like is None or element_of(x.meta.get("call")) == element_of(self.like.meta.get("call"))

    def emit(self, target: Any, *args: Any, spec: Any = None, **kwargs: Any) -> fx.Node:
        """A node as it stands, in normal form already."""
        return edit.call(self.graph, target, args, kwargs, like=self.like, spec=spec)

    def apply(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The normal form of a call: by its lowering, or as it stands."""
        from autopar.trace.normalize import lower

        return lower(self, target, args, kwargs)

    def inline(self, function: Callable[..., Any], *args: Any) -> Any:
        """The normal form of a function written in torch: its aten ops, each lowered in turn.

        ``args`` are nodes and plain values; the function sees meta tensors for the nodes.
        """
        inputs = [a for a in args if isinstance(a, fx.Node)]

        def closed(*tensors: Tensor) -> Any:
            rest = iter(tensors)
            return function(*(next(rest) if isinstance(a, fx.Node) else a for a in args))

        metas = [torch.empty(shape(n), dtype=dtype(n), device="meta") for n in inputs]
        module = _traced(closed, metas)
        env: dict[fx.Node, Any] = {}
        places = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(places)
            elif node.op == "call_function":
                call_args, kwargs = tree_map_only(
                    fx.Node, lambda n: env[n], (node.args, dict(node.kwargs)), is_leaf=_is_node
                )
                env[node] = self.apply(node.target, *call_args, **kwargs)
            elif node.op == "get_attr":
                env[node] = self.full((), getattr(module, node.target).item(), getattr(module, node.target).dtype)
            elif node.op == "output":
                return tree_map_only(fx.Node, lambda n: env[n], node.args[0], is_leaf=_is_node)
        raise AssertionError("a graph without output")

    def reshape(self, x: fx.Node, to: Any) -> fx.Node:
        """``x`` in another shape, explicit sizes only; chains collapse."""
        to = tuple(int(n) for n in to)
        while x.target in (aten.reshape.default, aten.unsqueeze.default) and self.here(x):
            x = x.args[0]  # type: ignore[assignment]
        return x if shape(x) == to else self.emit(aten.reshape.default, x, list(to), spec=Spec(to, dtype(x)))

    def expand(self, x: fx.Node, to: Any) -> fx.Node:
        """``x`` broadcast to ``to``."""
        to = tuple(int(n) for n in to)
        return x if shape(x) == to else self.emit(aten.expand.default, x, list(to), spec=Spec(to, dtype(x)))

    def cast(self, x: fx.Node, to: torch.dtype) -> fx.Node:
        """``x`` in dtype ``to``."""
        return x if dtype(x) == to else self.emit(aten._to_copy.default, x, dtype=to, spec=Spec(shape(x), to))

    def permute(self, x: fx.Node, dims: list[int]) -> fx.Node:
        """``x`` with its dims in another order."""
        if dims == sorted(dims):
            return x
        return self.emit(aten.permute.default, x, dims, spec=Spec(tuple(shape(x)[d] for d in dims), dtype(x)))

    def full(self, to: Any, value: Any, kind: torch.dtype) -> fx.Node:
        """A constant tensor of one value."""
        to = tuple(int(n) for n in to)
        return self.emit(aten.full.default, list(to), value, dtype=kind, spec=Spec(to, kind))

    def cut(self, x: fx.Node, dim: int, start: int, end: int) -> fx.Node:
        """``x[start:end]`` along ``dim``; a cut of a ``cat`` or of a constant is looked up where it can be."""
        size = shape(x)
        if start == 0 and end == size[dim]:
            return x
        to = (*size[:dim], end - start, *size[dim + 1 :])
        if x.target is aten.full.default and self.here(x):
            return self.full(to, x.args[1], dtype(x))
        if x.target is aten.cat.default and x.args[1] == dim and self.here(x):
            found = self._cut_of_cat(x.args[0], dim, start, end)
            if found is not None:
                return found
        return self.emit(aten.slice.Tensor, x, dim, start, end, spec=Spec(to, dtype(x)))

    def _cut_of_cat(self, parts: Any, dim: int, start: int, end: int) -> fx.Node | None:
        """The pieces that are left, where at most one of them has to be cut itself."""
        at, cuts, taken = 0, 0, []
        for part in parts:
            n = shape(part)[dim]
            lo, hi = max(start - at, 0), min(end - at, n)
            if lo < hi:
                cuts += (lo, hi) != (0, n) and part.target is not aten.full.default
                taken.append((part, lo, hi))
            at += n
        return self.cat([self.cut(p, dim, lo, hi) for p, lo, hi in taken], dim) if taken and cuts < 2 else None

    def cat(self, parts: list[fx.Node], dim: int) -> fx.Node:
        """``parts`` one after another along ``dim``; a cat of cats is one."""
        flat: list[fx.Node] = []
        for p in parts:
            nested = p.target is aten.cat.default and p.args[1] == dim and self.here(p)
            flat.extend(p.args[0] if nested else [p])  # type: ignore[arg-type]
        flat = [p for p in flat if shape(p)[dim] > 0] or flat[:1]
        return flat[0] if len(flat) == 1 else self.emit(aten.cat.default, flat, dim)


def _traced(function: Callable[..., Any], metas: list[Tensor]) -> fx.GraphModule:
    """The aten ops of a function, none of which writes in place."""
    with torch.no_grad():
        module = make_fx(torch.func.functionalize(function, remove="mutations"))(*metas)
        if any(n.op == "call_function" and _mutates(n.target) for n in module.graph.nodes):
            # kernels that torch writes in C++ (quantile, gru) mutate what they made, below that functionalization
            with enable_python_dispatcher():
                module = make_fx(dispatch_functionalize(function))(*metas)
    return module


def _mutates(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)
