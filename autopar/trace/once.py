"""Layers of one kind are traced once: the model's forward runs whole, but calls after the first are single nodes.

What the model does around its layers (which mask for which index, what it collects) is therefore seen as it is.
The nodes are replaced by the kind's graph, traced by itself, when the graph is normalized.
"""

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.trace.blueprint import mode_of
from autopar.trace.layers import Attribute, numbers, recording, repeated
from autopar.trace.structure import Node, Structure, scan

Look = tuple[tuple[int, ...], tuple[int, ...], str, str]  # shape, stride, dtype, device


class Unsafe(Exception):
    """The layers cannot be traced once; the whole model has to be."""


def look(t: Tensor) -> Look:
    """What a trace sees of a tensor."""
    return tuple(map(int, t.shape)), tuple(map(int, t.stride())), str(t.dtype).removeprefix("torch."), str(t.device)


def empty(like: Look) -> Tensor:
    """A tensor with that look."""
    shape, stride, dtype, device = like
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)


@torch.library.custom_op("autopar::layer", mutates_args=())
def layer(inputs: list[Tensor], looks: str, path: str) -> list[Tensor]:
    """A call of the layer at ``path``, not looked into. In exported graphs only; ``looks`` describes its results."""
    raise NotImplementedError(f"autopar::layer at {path} is a node of a trace and computes nothing")


@layer.register_fake
def _(inputs: list[Tensor], looks: str, path: str) -> list[Tensor]:
    return [empty(one) for one in _read(looks)]


def _joined(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x") if n)


def _write(looks: list[Look]) -> str:
    return ";".join(f"{_joined(shape)}|{_joined(stride)}|{dtype}|{device}" for shape, stride, dtype, device in looks)


def _read(text: str) -> list[Look]:
    out: list[Look] = []
    for part in text.split(";"):
        shape, stride, dtype, device = part.split("|")
        out.append((_sizes(shape), _sizes(stride), dtype, device))
    return out


@dataclass
class Call:
    """One way in which layers of a kind were called: the nests of the arguments, and the looks of all tensors."""

    structure: Structure
    inputs: list[Look]
    output: Node
    results: list[Look]


@dataclass
class Calls:
    """What the interception of a model's layers saw.

    ``uses``: path of each layer whose call became a node, and how it was called. ``hidden``: those without parameters.
    """

    kinds: dict[str, int]
    known: dict[Hashable, Call | None] = field(default_factory=dict)
    uses: dict[str, Call] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)


class Guarded(dict[str, Any]):
    """Stands for the parameters or submodules of a layer that is not looked into.

    It is empty, which the model's own forward may not see: while ``watch`` is not empty, looking raises Unsafe.
    """

    watch: list[bool]

    def _guard(self) -> None:
        if self.watch:
            raise Unsafe("the model's forward looks into its layers")

    def __iter__(self) -> Iterator[str]:
        self._guard()
        return super().__iter__()

    def __len__(self) -> int:
        self._guard()
        return super().__len__()

    def __contains__(self, key: object) -> bool:
        self._guard()
        return super().__contains__(key)

    def items(self) -> Any:
        """Pairs, of which there are none."""
        self._guard()
        return super().items()

    def values(self) -> Any:
        """Values, of which there are none."""
        self._guard()
        return super().values()

    def keys(self) -> Any:
        """Names, of which there are none."""
        self._guard()
        return super().keys()


@contextmanager
def intercepted(model: nn.Module, hide: bool, watch: list[bool]) -> Iterator[Calls]:
    """While the context lasts, only the first call of each kind of layer runs; the further ones are nodes.

    ``hide``: layers that are not the first of their kind have no parameters meanwhile, so that the export is short.
    """
    calls = Calls(repeated(model))
    modules = {path: model.get_submodule(path) for path in calls.kinds}
    first = {kind: path for path, kind in reversed(calls.kinds.items())}
    calls.hidden = {path for path, kind in calls.kinds.items() if hide and first[kind] != path}
    saved = [(m, dict(m.__dict__)) for m in modules.values()]
    try:
        for path, module in modules.items():
            module.forward = _stub(calls, path, module.forward)
        for path in calls.hidden:
            for name in ("_parameters", "_buffers", "_modules"):
                guarded = modules[path].__dict__[name] = Guarded()
                guarded.watch = watch
        yield calls
    finally:
        for module, attributes in saved:
            for name in ("forward", "_parameters", "_buffers", "_modules"):
                module.__dict__.pop(name, None)
                if name in attributes:
                    module.__dict__[name] = attributes[name]


def _stub(calls: Calls, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def real(*args: Any, **kwargs: Any) -> Any:
        if path in calls.hidden:
            raise Unsafe(f"{path} is called unlike the first of its kind")
        return forward(*args, **kwargs)

    @functools.wraps(forward)
    def stub(*args: Any, **kwargs: Any) -> Any:
        taken = _taken(args, kwargs)
        if taken is None or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return real(*args, **kwargs)
        structure, tensors = taken
        looks = [look(t) for t in tensors]
        key = (calls.kinds[path], structure.key, tuple(looks))
        if key not in calls.known:
            out = real(*args, **kwargs)
            calls.known[key] = _call(structure, looks, out)
            return out
        call = calls.known[key]
        if call is None or calls.uses.get(path, call) is not call:
            return real(*args, **kwargs)
        calls.uses[path] = call
        results = torch.ops.autopar.layer(tensors, _write(call.results), path)
        return Structure((), {}, (), call.output).rebuild(list(results))

    return stub


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Structure, list[Tensor]] | None:
    """The arguments' nests and tensors; None where something else than tensors and plain values is passed."""
    found: list[Tensor] = []
    try:
        nodes = tuple(scan(a, found, _refuse) for a in args)
        named = {k: scan(v, found, _refuse) for k, v in kwargs.items()}
    except Unsafe:
        return None
    return Structure(nodes, named, ()), found


def _refuse(value: Any) -> Any:
    raise Unsafe(type(value).__name__)


def _call(structure: Structure, looks: list[Look], out: Any) -> Call | None:
    found: list[Tensor] = []
    try:
        node = scan(out, found, _refuse)
    except Unsafe:
        return None
    if not found or not looks:
        return None
    return Call(structure, looks, node, [look(t) for t in found])


@dataclass
class Bodies:
    """The graphs of the kinds, each with the numbers that its trace looked at."""

    export: Callable[[nn.Module, Structure, list[Tensor]], Any]
    made: list[tuple[Call, Hashable, dict[Attribute, Any], Any]] = field(default_factory=list)

    def of(self, element: nn.Module, kind: Hashable, call: Call, watched: set[Attribute]) -> Any:
        """The graph of an element: one already made where it looked at equal numbers only, else a new one."""
        mine = numbers(element)
        for its_call, its_kind, read, body in self.made:
            if its_call is call and its_kind == kind and all(mine.get(a) == v for a, v in read.items()):
                return body
        structure = Structure(call.structure.args, call.structure.kwargs, ())
        with mode_of(element) or nullcontext():  # a mask of a long sequence must not take memory
            inputs = [empty(one) for one in call.inputs]
        with recording(element, watched) as seen:
            body = self.export(element, structure, inputs)
        looks = [(shape, dtype) for shape, _, dtype, _ in call.results]
        if structure.output is None or structure.output.key != call.output.key or body.looks != looks:
            raise Unsafe("the layer's output is unlike that of the first of its kind")
        self.made.append((call, kind, {a: mine[a] for a in seen}, body))
        return body


def bodies_of(
    model: nn.Module, calls: Calls, export: Callable[[nn.Module, Structure, list[Tensor]], Any]
) -> dict[str, Any]:
    """The graph of each layer whose call is a node, by path. Raises Unsafe."""
    made = Bodies(export)
    values: dict[Hashable, list[dict[Attribute, Any]]] = {}
    for path, kind in calls.kinds.items():
        values.setdefault(kind, []).append(numbers(model.get_submodule(path)))
    watched = {k: {a for a, v in group[0].items() if any(g.get(a) != v for g in group)} for k, group in values.items()}
    return {
        path: made.of(model.get_submodule(path), calls.kinds[path], call, watched[calls.kinds[path]])
        for path, call in calls.uses.items()
    }
