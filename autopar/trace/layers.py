"""Which elements of a model's lists of modules would be traced alike, and which of their numbers a trace looks at."""

import types
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace

from autopar.ir.modules import once, walk

Attribute = tuple[str, str]  # path of the module in the element, name
SINGLE = "_autopar_single"  # attribute of classes whose modules are traced whole, lists in them included


def repeated(model: nn.Module, everywhere: bool = False) -> dict[str, int]:
    """Path -> number of the kind of each element of an outermost list in which at least three are of one kind.

    ``everywhere``: also of lists in modules that are traced whole.
    """
    found: dict[str, int] = {}
    known: dict[Hashable, int] = {}

    def visit(module: nn.Module, path: str) -> None:
        if hasattr(type(module), SINGLE) and not everywhere:
            return
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= 3:
            children = ((f"{path}{name}", kind_of(child)) for name, child in module.named_children())
            kinds = {p: known.setdefault(k, len(known)) for p, k in children}
            counts = Counter(kinds.values())
            if many := {p: k for p, k in kinds.items() if counts[k] >= 3}:
                found.update(many)
                return
        for name, child in module.named_children():
            visit(child, f"{path}{name}.")

    visit(model, "")
    return found


def kind_of(element: nn.Module) -> Hashable:
    """What must agree for two elements to be traced alike: everything but tensors' values and plain numbers."""
    rows: list[Hashable] = []
    for path, module in walk(element):
        tensors = [*module._parameters.items(), *module._buffers.items()]
        looks = tuple((n, None if t is None else _look(t)) for n, t in tensors)
        said = ((n, v) for n, v in plain_attributes(module) if n not in _OF_EVERY or v)  # no empty table of hooks
        attributes = tuple(sorted((n, _frozen(v)) for n, v in said))
        rows.append((path, type(module), looks, attributes))
    return tuple(rows)


def _look(t: Tensor) -> Hashable:
    return (type(t), tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.requires_grad)


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own attributes, its tensors and submodules excepted."""
    for name, value in module.__dict__.items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield name, value


_OF_EVERY = frozenset(vars(nn.Module()))
WATCHED = "_autopar_watched"  # of a look-up that records: ids of the modules whose numbers it watches


def is_number(value: Any) -> bool:
    """Whether an attribute may differ between elements of one kind, as long as nobody reads it."""
    return type(value) in (int, float)


def _frozen(value: Any) -> Hashable:
    """Equal for equal plain data; identity for the rest; any number for numbers."""
    if is_number(value):
        return type(value).__name__
    return exact(value, 4)


def exact(value: Any, depth: int) -> Hashable:
    """Equal for equal plain data, ``depth`` containers deep; identity for the rest."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)) and depth:
        return (type(value).__name__, tuple(exact(v, depth - 1) for v in value))
    if isinstance(value, dict) and depth:
        return (type(value).__name__, tuple((exact(k, depth - 1), exact(v, depth - 1)) for k, v in value.items()))
    if isinstance(value, (set, frozenset)) and depth:
        return (type(value).__name__, frozenset(exact(v, depth - 1) for v in value))
    if isinstance(value, types.MethodType):
        return ("method", value.__func__, id(value.__self__))
    return ("object", id(value))


def numbers(element: nn.Module) -> dict[Attribute, Any]:
    """Every plain number of the element's modules."""
    return {
        (path, name): value
        for path, module in walk(element)
        for name, value in plain_attributes(module)
        if is_number(value)
    }


def lookup() -> Any:
    """How attributes that are in no ``__dict__`` are looked up aside from a trace; each recording has its own way."""
    return _symbolic_trace._orig_module_getattr


def watching(module: nn.Module) -> Any:
    """What is told when a number of the module is looked at; None where nothing is."""
    watched: frozenset[int] = getattr(lookup(), WATCHED, frozenset())
    return lookup() if any(id(m) in watched for m in once(module)) else None


@contextmanager
def recording(element: nn.Module, watched: set[Attribute]) -> Iterator[set[Attribute]]:
    """Yields the set of those ``watched`` attributes that are looked at while the context lasts.

    The attributes are taken out of the modules, so that looking one up ends in ``nn.Module.__getattr__``, which calls
    what torch.fx takes for the ordinary one while it traces.
    """
    read: set[Attribute] = set()
    hidden: dict[tuple[int, str], tuple[Attribute, Any]] = {}
    modules = dict(walk(element))
    ordinary = nn.Module.__getattr__

    def getattr_(self: nn.Module, name: str) -> Any:
        entry = hidden.get((id(self), name))
        if entry is None:
            return ordinary(self, name)
        read.add(entry[0])
        return entry[1]

    try:
        own = {id(modules[path]) for path, _ in watched}
        setattr(getattr_, WATCHED, own | getattr(ordinary, WATCHED, frozenset()))
        nn.Module.__getattr__ = _symbolic_trace._orig_module_getattr = getattr_  # type: ignore[method-assign]
        for path, name in watched:
            hidden[id(modules[path]), name] = ((path, name), modules[path].__dict__.pop(name))
        yield read
    finally:
        nn.Module.__getattr__ = _symbolic_trace._orig_module_getattr = ordinary  # type: ignore[method-assign]
        for (path, name), value in hidden.values():
            modules[path].__dict__[name] = value
