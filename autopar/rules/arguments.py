"""The arguments of a node by the names of its op's schema."""

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import fx


@lru_cache(maxsize=None)
def names(target: Any) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each parameter of an op or function; ``inspect.Parameter.empty`` if required."""
    if isinstance(target, torch._ops.OpOverload):
        empty = inspect.Parameter.empty
        return tuple((a.name, a.default_value if a.has_default_value() else empty) for a in target._schema.arguments)
    return tuple((p.name, p.default) for p in inspect.signature(target).parameters.values())


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of the node by name, defaults filled in."""
    known = names(node.target)
    out = {name: default for name, default in known if default is not inspect.Parameter.empty}
    out.update(zip((name for name, _ in known), node.args))
    out.update(node.kwargs)
    return out


def with_arguments(node: fx.Node, **changed: Any) -> None:
    """Set some of the node's arguments by name, keeping the others."""
    known = [name for name, _ in names(node.target)]
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in changed.items():
        at = known.index(name)
        if name not in kwargs and at < len(args):
            args[at] = value
        else:
            kwargs[name] = value
    node.args, node.kwargs = tuple(args), kwargs


def shape_of(arg: Any) -> tuple[int, ...]:
    """Global shape of a tensor argument."""
    shape: tuple[int, ...] = arg.meta["spec"].shape
    return shape


def normal_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims as non-negative ints; None or an empty list means all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(rank))
    return tuple(d % rank for d in ((dims,) if isinstance(dims, int) else dims)) if rank else ()
