"""Layers of experts are single nodes of a trace: found by their structure, whatever they are called.

Such a module holds stacked parameters, one slice for each expert, and is called with tokens [T, H], the experts that
each token chose [T, k] and their weights [T, k]. What one expert computes is read off the module's own forward, run
for choices that we give it, on tensors without values (``trace.record``). All experts must compute the same.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.ir import ops
from autopar.ir.grouped import Body
from autopar.ir.program import Spec
from autopar.rules.experts import keeps_rows
from autopar.trace.builder import Builder, lowering
from autopar.trace.expert_body import Reading, body_of
from autopar.trace.layers import SINGLE, kind_of, numbers
from autopar.trace.loops import families_of, traced_stack
from autopar.trace.loops import substitute as loop
from autopar.trace.record import Recorder, Unrecognized, aside
from autopar.trace.registered import adapter_of

Known = tuple[Body, int, torch.dtype]  # what one expert computes, its width, the result's dtype
ROWS = (3, 5)  # tokens for each expert of two records: what depends on the number of rows differs between them


@torch.library.custom_op("autopar::experts", mutates_args=())
def traced_experts(
    hidden: Tensor, index: Tensor, weights: Tensor, params: list[Tensor], body: str, width: int, dtype: torch.dtype
) -> Tensor:
    """A call of a layer of experts. In exported graphs only."""
    raise NotImplementedError("autopar::experts is a node of a trace and computes nothing")


@traced_experts.register_fake
def _(
    hidden: Tensor, index: Tensor, weights: Tensor, params: list[Tensor], body: str, width: int, dtype: torch.dtype
) -> Tensor:
    return hidden.new_empty((hidden.shape[0], width), dtype=dtype)


@lowering(torch.ops.autopar.experts.default)
def _lower(
    b: Builder,
    hidden: fx.Node,
    index: fx.Node,
    weights: fx.Node,
    params: Any,
    body: str,
    width: int,
    dtype: torch.dtype,
) -> fx.Node:
    spec = Spec((hidden.meta["spec"].shape[0], width), dtype)
    return b.emit(ops.experts, hidden, index, weights, list(params), _parsed(body), dtype, spec=spec)


@lowering(traced_stack._opoverload)
def _lower_stack(b: Builder, params: Any) -> fx.Node:
    first = params[0].meta["spec"]
    return b.emit(ops.stacked, *params, spec=Spec((len(params), *first.shape), first.dtype))


@lru_cache(maxsize=None)
def _parsed(text: str) -> Body:
    """A body from its own repr, in which dtypes and infinities are names."""
    names = {"__builtins__": {}, "torch": torch, "inf": float("inf"), "nan": float("nan")}
    body: Body = eval(text, names)
    return body


@contextmanager
def single_nodes(model: nn.Module, dense: bool = False) -> Iterator[None]:
    """While the context lasts, layers of experts in the model's forward are single nodes.

    ``dense``: so are loops in which every token goes to every expert.
    """
    found = dict(_found(model, dense))
    kinds = {module: type(module) for module in found}
    made: dict[Any, type] = {}
    try:
        for module, forward in found.items():
            key = (kinds[module], forward)
            if key not in made:
                made[key] = _subclass(*key)
            module.__class__ = made[key]
        yield
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind


def _found(model: nn.Module, dense: bool) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules that may be layers of experts, or hold a loop over some, and what is called for their forward."""
    known: dict[Any, Known | None] = {}
    loops: dict[Any, Any] = {}
    made: dict[Any, Callable[..., Any]] = {}
    inside: set[int] = set()
    for module in model.modules():
        kind = type(module)
        if adapter_of(kind):
            ways = "adapter"
        elif stacked(module) and len(_parameters(kind)) >= 3:
            ways = "experts"
        elif id(module) not in inside and families_of(module) is not None and not _smaller(module):
            ways = "loop"
        else:
            continue
        inside |= {id(m) for m in module.modules()} if ways != "experts" else set()
        if (kind, ways) not in made:
            found = adapter_of(kind) or (_substitute(kind, known) if ways == "experts" else loop(kind, loops, dense))
            made[kind, ways] = found
        yield module, made[kind, ways]


def _smaller(module: nn.Module) -> bool:
    """Whether a module inside is itself a layer of experts, or holds a loop over some."""
    inner = (m for m in module.modules() if m is not module)
    return any(adapter_of(type(m)) or stacked(m) and len(_parameters(type(m))) >= 3 or families_of(m) for m in inner)


def stacked(module: nn.Module) -> int:
    """The number of experts whose parameters the module itself holds, one above the other; 0 for none."""
    own = [p for p in module._parameters.values() if p is not None]
    counts = {p.shape[0] if p.ndim else 0 for p in own}
    fits = any(p.ndim >= 3 for p in own) and len(counts) == 1 and all(p.is_floating_point() for p in own)
    lone = sum(1 for _ in module.parameters()) == len(own) and not module._buffers
    return counts.pop() if fits and lone else 0


def _parameters(kind: type) -> tuple[str, ...]:
    """Names of what the forward takes, in order; nothing where it takes any number of things."""
    given = list(inspect.signature(_plain(kind)).parameters.values())[1:]
    return () if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given) else tuple(p.name for p in given)


def _plain(kind: type) -> Callable[..., Any]:
    """The forward under its decorators, which may choose another implementation of the same."""
    forward: Callable[..., Any] = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    return forward


def _subclass(kind: type, forward: Callable[..., Any]) -> type:
    """A class like ``kind`` with another forward."""
    made = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, SINGLE: True})
    made.__qualname__ = kind.__qualname__
    return made


def _substitute(kind: type, known: dict[Any, Known | None]) -> Callable[..., Any]:
    """A forward for ``kind`` that is one node where it can be."""
    names = _parameters(kind)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        taken = [given.get(name) for name in names[:3]]
        fits = len(given) == 3 and all(isinstance(t, Tensor) for t in taken)
        found = _look_up(known, self, kind, taken) if fits else None
        if found is None:
            return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        body, width, dtype = found
        own = [p for p in self._parameters.values() if p is not None]
        return torch.ops.autopar.experts(*taken, own, repr(body), width, dtype)

    return forward


def _look_up(known: dict[Any, Known | None], module: Any, kind: type, taken: list[Any]) -> Known | None:
    """What one expert of the module computes, its width and the result's dtype; None where that cannot be said."""
    hidden, index, weights = taken
    fits = hidden.ndim == index.ndim == weights.ndim == 2 and index.shape == weights.shape
    if not fits or index.is_floating_point() or not weights.is_floating_point() or index.shape[1] > stacked(module):
        return None
    alike = (kind, kind_of(module), tuple(numbers(module).items()))
    key = (*alike, hidden.shape[1], index.shape[1], hidden.dtype, weights.dtype)
    if key not in known:
        with aside(), torch.no_grad():
            try:
                known[key] = _read(module, kind, int(hidden.shape[1]), index.shape[1], hidden.dtype, weights.dtype)
            except (Unrecognized, RuntimeError, TypeError, IndexError, ValueError):
                known[key] = None
    return known[key]


def _read(module: Any, kind: type, width: int, choices: int, dtype: torch.dtype, weighing: torch.dtype) -> Known:
    found = set()
    for rows in ROWS:
        seen, experts = Recorder(), stacked(module)
        like = {n: _empty(p.shape, p.dtype) for n, p in module._parameters.items() if p is not None}
        hidden = _empty((experts * rows, width), dtype)
        weights = _empty((experts * rows, choices), weighing)
        index = (torch.arange(experts * rows)[:, None] * choices + torch.arange(choices)) % experts
        for name, value in (*like.items(), ("hidden", hidden), ("weights", weights)):
            seen.track(value, f"${name}" if name in like else name)
        with seen:
            out = _plain(kind)(_copy(module, kind, like), hidden, index, weights)
        if not isinstance(out, Tensor) or out.shape[:-1] != hidden.shape[:-1] or id(out) not in seen.nodes:
            raise Unrecognized("the result is not a row for each token")
        chains = set(Reading(seen, seen.nodes[id(out)], index).chains())
        if len(chains) != 1:
            raise Unrecognized("experts compute different things")
        specs = {n: Spec(tuple(p.shape), p.dtype) for n, p in like.items()}
        body = body_of(chains.pop(), Spec((rows * choices, width), dtype), specs)
        if not keeps_rows(body, Spec((rows * choices, width), dtype), tuple(specs.values())):
            raise Unrecognized("an expert mixes its rows")
        found.add((body, int(out.shape[1]), out.dtype))
    if len(found) != 1:
        raise Unrecognized("an expert that depends on the number of its rows")
    return found.pop()


def _copy(module: Any, kind: type, params: dict[str, Tensor]) -> Any:
    """The module of its own class with other parameters."""
    out = copy.copy(module)
    out.__class__ = kind
    out.__dict__["_parameters"] = dict.fromkeys(module._parameters, None) | params
    return out


def _empty(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(int(n) for n in shape), dtype=dtype, device="meta")
