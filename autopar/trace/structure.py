"""How a model's inputs become a flat list of tensors and its outputs are put together again."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.trace.leaves import PLAIN, check, key_of


@dataclass(frozen=True)
class Node:
    """A place in a nest: a tensor (kind "tensor"), a kept value ("leaf"), or a container with children.

    ``keys`` name the children; ``template`` is what a container or a leaf is rebuilt from.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple["Node", ...] = ()
    template: Any = None

    @property
    def key(self) -> Hashable:
        """Hashable identity: the containers' types, their keys, and the leaves that are no tensors."""
        if self.kind == "tensor":
            return "tensor"
        if self.kind == "leaf":
            return (type(self.template), key_of(self.template))
        made = self.template if isinstance(self.template, type) else type(self.template)
        return (self.kind, made, self.keys, tuple(c.key for c in self.children))


def parts_of(value: Any) -> tuple[str, list[tuple[Any, Any]]] | None:
    """(kind, [(key, child)]) of a container; None for anything else."""
    if isinstance(value, Mapping):
        return "mapping", list(value.items())
    if isinstance(value, (list, tuple)):
        return "sequence", list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclass", [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def scan(value: Any, found: list[Tensor], opaque: Callable[[Any], Any] = lambda v: v) -> Node:
    """The nest of ``value``; its tensors are appended to ``found`` in order.

    ``opaque`` gives what to keep of a leaf that is neither a tensor nor plain data.
    """
    if isinstance(value, Tensor):
        found.append(value)
        return Node("tensor")
    parts = parts_of(value)
    if parts is None:
        return Node("leaf", template=value if isinstance(value, PLAIN) else opaque(value))
    kind, items = parts
    children = tuple(scan(v, found, opaque) for _, v in items)
    return Node(kind, tuple(k for k, _ in items), children, _shell(value, kind))


def _shell(value: Any, kind: str) -> Any:
    """``value`` without its children, which may be large or traced tensors."""
    if kind == "sequence":
        return type(value)
    shell = copy.copy(value)
    if kind == "mapping":
        try:
            for key in list(shell):
                dict.__setitem__(shell, key, None) if isinstance(shell, dict) else shell.__setitem__(key, None)
        except TypeError:
            return dict
    for name in getattr(shell, "__dict__", {}):
        if isinstance(shell.__dict__[name], Tensor) or parts_of(shell.__dict__[name]):
            shell.__dict__[name] = None
    return shell


def fill(node: Node, tensors: Iterator[Tensor]) -> Any:
    """The nest with ``tensors`` in its places."""
    if node.kind == "tensor":
        return next(tensors)
    if node.kind == "leaf":
        return node.template
    children = [fill(c, tensors) for c in node.children]
    if node.kind == "sequence":
        return _sequence(node.template, children)
    pairs = list(zip(node.keys, children))
    if node.kind == "mapping":
        return _mapping(node.template, pairs)
    out = copy.copy(node.template)
    for name, child in pairs:
        object.__setattr__(out, name, child)
    return out


def _sequence(kind: type, children: list[Any]) -> Any:
    if hasattr(kind, "_fields") or kind.__module__ == "torch.return_types":
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    return kind(children)


def _mapping(shell: Any, pairs: list[tuple[Any, Any]]) -> Any:
    if shell is dict:
        return dict(pairs)
    if dataclasses.is_dataclass(shell):  # an output class that is both: its constructor keeps the two views equal
        make: Any = type(shell)
        return make(**dict(pairs))
    out = copy.copy(shell)
    for key, child in pairs:
        out[key] = child
    return out


def names_of(node: Node, prefix: str = "") -> Iterator[str]:
    """A dotted path for each tensor of the nest, in order."""
    if node.kind == "tensor":
        yield prefix
    for key, child in zip(node.keys, node.children):
        yield from names_of(child, f"{prefix}.{key}" if prefix else str(key))


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(name of the model's own argument, value) of everything passed, positional ones first."""
    names = list(inspect.signature(model.forward).parameters.values())
    out = []
    for i, value in enumerate(args):
        plain = i < len(names) and names[i].kind is not inspect.Parameter.VAR_POSITIONAL
        out.append((names[i].name if plain else f"args.{i}", value))
    return out + list(kwargs.items())


@dataclass
class Structure:
    """The nests of one call's inputs and of the model's output. Filled by the trace."""

    args: tuple[Node, ...]
    kwargs: dict[str, Node]
    names: tuple[str, ...]
    output: Node | None = None

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple["Structure", list[Tensor]]:
        """The structure of a call's inputs, and their tensors."""
        found: list[Tensor] = []
        given = bind(model, args, kwargs)
        nodes = [(name, scan(value, found, functools.partial(check, name))) for name, value in given]
        names = tuple(path for name, node in nodes for path in names_of(node, name))
        n = len(args)
        return Structure(tuple(node for _, node in nodes[:n]), dict(nodes[n:]), names), found

    @property
    def key(self) -> Hashable:
        """Hashable: structure and values that are no tensors. Calls with equal keys differ in tensors only."""
        return (tuple(n.key for n in self.args), tuple((k, n.key) for k, n in sorted(self.kwargs.items())))

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of ``Program.inputs``. Raises AutoparError ``input-structure``."""
        if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
            had = ", ".join(self.names)
            raise AutoparError(
                "input-structure",
                f"inputs: {len(args)} positional, {sorted(kwargs)}; traced {len(self.args)}, {sorted(self.kwargs)}",
                f"pass the inputs as at the trace: {had}",
            )
        found: list[Tensor] = []
        pairs = [*zip(args, self.args), *((kwargs[k], node) for k, node in self.kwargs.items())]
        for value, node in pairs:
            if scan(value, found).key != node.key:
                raise AutoparError(
                    "input-structure",
                    f"inputs: {type(value).__name__} differs in structure or plain values from the one traced",
                    f"pass the inputs as at the trace: {', '.join(self.names)}",
                )
        return found

    def unflatten(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs that hold ``tensors``."""
        rest = iter(tensors)
        return tuple(fill(n, rest) for n in self.args), {k: fill(n, rest) for k, n in self.kwargs.items()}

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """The model's own output structure, holding ``tensors`` (the "user" outputs in order)."""
        assert self.output is not None
        return fill(self.output, iter(tensors))
