"""Layers of experts are single nodes of a trace: found by their structure, whatever they are called.

Such a module holds stacked parameters, one slice for each expert, and is called with tokens [T, H], the experts that
each token chose [T, k] and their weights [T, k]. What one expert computes is read off the module's own forward, run
for choices that we make (``trace.witness``). All experts must compute the same.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.ir import ops
from autopar.ir.grouped import Body
from autopar.ir.modules import named, once
from autopar.ir.program import Spec
from autopar.trace import places
from autopar.trace.builder import Builder, lowering
from autopar.trace.layers import SINGLE, kind_of, numbers, repeated, watching
from autopar.trace.loops import Families, Record, families_of, traced_stack, understood
from autopar.trace.loops import substitute as loop
from autopar.trace.once import Unsafe
from autopar.trace.record import aside
from autopar.trace.registered import adapter_of
from autopar.trace.selections import Casts, whole_of

# Parameters, what an expert computes, its width and dtype, and the dtypes to which weights are cast.
Known = tuple[tuple[str, ...], Body, int, torch.dtype, Casts]
ROWS = 3  # tokens for each expert of a record


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


class Candidates:
    """Modules of a model that may be layers of experts, or hold a loop over some, while the model is traced.

    Each has a class with another forward. One in which no experts are found runs as it stands; if it holds layers that
    could be traced once, a trace that was made for the other case has to begin anew.

    Attributes:
        unseen: why, for each kind of those that are none.
        restart: whether to raise Unsafe where such a trace has to begin anew. restarts: how often that was.
    """

    def __init__(self, model: nn.Module, dense: bool) -> None:
        self.dense = dense
        self.paths = {id(module): path for path, module in named(model).items()}
        self.kinds: dict[nn.Module, type] = {}
        self.looks: dict[nn.Module, Any] = {}
        self.known: dict[Any, Known | str] = {}
        self.loops: dict[Any, Record | str] = {}
        self.restart, self.restarts = False, 0
        self.unseen: list[str] = []
        made: dict[Any, type] = {}
        for module, ways in _candidates(model):
            kind = self.kinds[module] = type(module)
            self.looks[module] = kind_of(module)
            if (kind, ways) not in made:
                made[kind, ways] = _subclass(kind, self._forward(kind, ways), single=True)
            module.__class__ = made[kind, ways]

    def _forward(self, kind: type, ways: str) -> Callable[..., Any]:
        if ways == "adapter":
            return adapter_of(kind)  # type: ignore[return-value]
        if ways == "experts":
            return _substitute(kind, self.known, self._give_up)
        return loop(kind, self.loops, self.dense, self._give_up)

    def _give_up(self, module: nn.Module, why: str) -> None:
        """From now on, the module and those like it run as they stand."""
        kind, text = self.kinds[module], f"{places.UNSEEN} in {self.paths[id(module)] or 'the model'}: {why}"
        plain = _subclass(kind, _noting(kind, text), single=False)
        for other, look in self.looks.items():
            if self.kinds[other] is kind and look == self.looks[module]:
                other.__class__ = plain
        self.unseen.append(text)
        if self.restart and repeated(module):
            self.restarts += 1
            raise Unsafe("layers of one kind are in a module that could have been one of experts")

    def leave(self) -> None:
        """Every module has its own class again."""
        for module, kind in self.kinds.items():
            module.__class__ = kind


@contextmanager
def single_nodes(model: nn.Module, dense: bool = False) -> Iterator[Candidates]:
    """While the context lasts, layers of experts in the model's forward are single nodes.

    ``dense``: so are loops in which every token goes to every expert.
    """
    found = Candidates(model, dense)
    try:
        yield found
    finally:
        found.leave()


def _candidates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules that may be layers of experts, or hold a loop over some, and which: "adapter", "experts", "loop"."""
    inside: set[int] = set()
    for module in once(model):
        kind = type(module)
        if adapter_of(kind):
            ways = "adapter"
        elif stacked(module) and len(_parameters(kind)) >= 3:
            ways = "experts"
        elif id(module) not in inside and families_of(module) is not None and not _smaller(module):
            ways = "loop"
        else:
            continue
        inside |= {id(m) for m in once(module)} if ways != "experts" else set()
        yield module, ways


def _smaller(module: nn.Module) -> bool:
    """Whether a module inside is itself a layer of experts, or holds a loop over some."""
    inner = (m for m in once(module) if m is not module)
    return any(adapter_of(type(m)) or stacked(m) and len(_parameters(type(m))) >= 3 or families_of(m) for m in inner)


def stacked(module: nn.Module) -> int:
    """The number of experts whose parameters the module itself holds, one above the other; 0 for none."""
    own = [p for p in module._parameters.values() if p is not None]
    counts = {p.shape[0] if p.ndim else 0 for p in own}
    fits = any(p.ndim >= 3 for p in own) and len(counts) == 1 and all(p.is_floating_point() for p in own)
    lone = fits and sum(1 for _ in module.parameters()) == len(own) and not module._buffers
    return counts.pop() if lone else 0


def _parameters(kind: type) -> tuple[str, ...]:
    """Names of what the forward takes, in order; nothing where it takes any number of things."""
    given = list(inspect.signature(_plain(kind)).parameters.values())[1:]
    return () if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given) else tuple(p.name for p in given)


def _plain(kind: type) -> Callable[..., Any]:
    """The forward under its decorators, which may choose another implementation of the same."""
    forward: Callable[..., Any] = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    return forward


def _subclass(kind: type, forward: Callable[..., Any], single: bool) -> type:
    """A class like ``kind`` with another forward."""
    more = {SINGLE: True} if single else {}
    made = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, **more})
    made.__qualname__ = kind.__qualname__
    return made


def _noting(kind: Any, text: str) -> Callable[..., Any]:
    """The forward of ``kind``, whose failures say more."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind.forward(self, *args, **kwargs)
        except Exception as error:
            error.add_note(text)
            raise

    return forward


def _substitute(kind: type, known: dict[Any, Known | str], otherwise: Callable[[Any, str], None]) -> Callable[..., Any]:
    """A forward for ``kind`` that is one node where it can be; ``otherwise`` is called where it cannot."""
    names = _parameters(kind)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(self), SINGLE):
            return type(self).forward(self, *args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        taken = [given.get(name) for name in names[:3]]
        fits = len(given) == 3 and all(isinstance(t, Tensor) for t in taken)
        found = _look_up(known, self, kind, taken) if fits else "it is not called with tokens, choices and weights"
        if isinstance(found, str):
            otherwise(self, found)
            return type(self).forward(self, *args, **kwargs)
        params, body, width, dtype, casts = found
        weights: Any = taken[2]
        for dtype_ in casts:
            weights = weights.to(dtype_)
        own = [self._parameters[name] for name in params]
        return torch.ops.autopar.experts(*taken[:2], weights, own, repr(body), width, dtype)

    return forward


def _look_up(known: dict[Any, Known | str], module: Any, kind: type, taken: list[Any]) -> Known | str:
    """What one expert of the module computes, its width and the result's dtype; or why that cannot be said."""
    hidden, index, weights = taken
    fits = hidden.ndim == index.ndim == weights.ndim == 2 and index.shape == weights.shape
    if not fits or index.is_floating_point() or not weights.is_floating_point() or index.shape[1] > stacked(module):
        return "it is not called with tokens [T, H], choices [T, k] and weights [T, k]"
    alike = (kind, kind_of(module), tuple(numbers(module).items()), watching(module))
    key = (*alike, hidden.shape[1], index.shape[1], hidden.dtype, weights.dtype)
    if key not in known:
        rows = ROWS * stacked(module)
        given = tuple(torch.empty((rows, int(x.shape[1])), dtype=x.dtype, device="meta") for x in taken)
        own = {n: Spec(tuple(p.shape), p.dtype) for n, p in module.named_parameters()}
        found = Families(stacked(module), own, {n: (n, -1) for n in own})
        plain = type(kind.__name__, (kind,), {"forward": _plain(kind)})
        record = understood(module, plain, found, given, {})
        with aside():
            known[key] = record if isinstance(record, str) else _alone(record)
    return known[key]


def _alone(record: Record) -> Known | str:
    """One op of the tokens, choices and weights that were given; or what else there is."""
    node, op = record.nodes[0], record.layer.routed.get(record.nodes[0])
    if op is None or len(record.nodes) != 1 or op.base is not None or op.index is None or len(op.weights) != 1:
        return "it computes more than its experts"
    weighing = op.weights[0]
    given = [whole_of(n) for n in (op.hidden, op.index, *weighing.nodes)]
    if weighing.kind != "choices" or given != ["#0", "#1", "#2"]:
        return "its arguments are no tokens, choices and weights"
    return op.params, op.body, int(node.meta["val"].shape[-1]), node.meta["val"].dtype, weighing.casts
