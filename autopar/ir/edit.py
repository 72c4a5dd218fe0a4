"""The one way to add, replace and remove nodes of a Program's graphs: metadata is kept and specs are inferred."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autopar.ir.program import Spec

CARRIED = ("module", "call", "source", "stage")  # metadata that a new node takes over from the one it stands in for


def infer(target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Spec, or tuple of Specs, of what ``target`` returns for nodes with specs; nothing is computed."""
    args, kwargs = tree_map(_stand_in, (tuple(args), dict(kwargs)), is_leaf=lambda v: isinstance(v, fx.Node))
    with torch.device("meta"), torch.no_grad():
        return spec_of(target(*args, **kwargs))


def _stand_in(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    spec = value.meta["spec"]
    if isinstance(spec, Spec):
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return tuple(None if s is None else torch.empty(s.shape, dtype=s.dtype, device="meta") for s in spec)


def spec_of(value: Any) -> Any:
    """The Spec of a tensor; a tuple of them for several."""
    if isinstance(value, Tensor):
        return Spec(tuple(int(s) for s in value.shape), value.dtype)
    return tuple(spec_of(v) for v in value) if isinstance(value, (tuple, list)) else None


def call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node | None = None,
    spec: Any = None,
) -> fx.Node:
    """A new node at the insertion point, with the module and source of ``like``; its spec is inferred if not given."""
    kwargs = kwargs or {}
    node = graph.call_function(target, tuple(args), kwargs)
    node.meta = {k: like.meta[k] for k in CARRIED if k in like.meta} if like is not None else {}
    node.meta["spec"] = infer(target, args, kwargs) if spec is None else spec
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """Every reader of ``old`` reads ``new``; ``old`` goes."""
    assert old.meta.get("spec") == new.meta.get("spec"), f"{old} {old.meta.get('spec')} -> {new} {new.meta.get('spec')}"
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def drop_dead(graph: fx.Graph) -> int:
    """Remove nodes that nobody reads, placeholders excepted. Returns how many went."""
    gone = 0
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)
            gone += 1
    return gone


def merge_equal(graph: fx.Graph, scope: Callable[[fx.Node], Any] = lambda n: None) -> int:
    """Make one node of several that compute the same, where ``scope`` says the same of them. Returns how many went.

    Calls of blocks stay. Random ops carry a key in their arguments that tells them apart.
    """
    seen: dict[Any, fx.Node] = {}
    gone = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), scope(node))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            gone += 1
    return gone


def _frozen(value: Any) -> Any:
    """A hashable equal of a node argument; numbers keep their type and zeros their sign: 0, 0.0 and -0.0 differ."""
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    return (type(value).__name__, repr(value)) if isinstance(value, (int, float, complex)) else value


frozen = _frozen
