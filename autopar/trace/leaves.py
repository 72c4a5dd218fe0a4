"""Inputs that are no tensors: which are taken, and what tells one call's from another's."""

import dis
import enum
import functools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

PLAIN = (
    int, float, complex, str, bytes, bool, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, slice, range,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Same:
    """An object as a key, which keeps it alive: equal to itself only. Its text is alike on all ranks."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        named = self.value if hasattr(self.value, "__qualname__") else type(self.value)
        return f"{type(self.value).__name__} {getattr(named, '__module__', None)}.{named.__qualname__}"


def key_of(value: Any, within: frozenset[int] = frozenset()) -> Hashable:
    """Equal for values that a program cannot tell apart; of callables: for one object in one state.

    ``within``: ids of the callables that hold it.
    """
    if isinstance(value, (float, complex)):
        return repr(value)  # tells -0.0 from 0.0, and makes nan equal to itself
    if isinstance(value, slice):
        return tuple(_state(v, within) for v in (value.start, value.stop, value.step))
    if isinstance(value, PLAIN) or not callable(value):
        return value
    own = Same(value.__func__ if isinstance(value, MethodType) else value)
    return (own, _state(_held(value), within | {id(value)})) if id(value) not in within else own


def _state(value: Any, within: frozenset[int]) -> Hashable:
    """What a callable holds, as far as it can be compared: plain values, containers, tensors' versions, modules."""
    if isinstance(value, Tensor):
        return Same(value), 0 if value.is_inference() else value._version
    if isinstance(value, Mapping):
        return tuple((_state(k, within), _state(v, within)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_state(v, within) for v in value)
    if isinstance(value, (set, frozenset)):
        return type(value), tuple(sorted((_state(v, within) for v in value), key=repr))
    if isinstance(value, (*PLAIN, nn.Module, functools.partial, MethodType)):
        return type(value), key_of(value, within)
    return Same(value)


def _held(value: Any) -> Any:
    """What of a callable may change, or differs between two of one kind."""
    if isinstance(value, MethodType):
        return value.__self__, dict(getattr(value.__self__, "__dict__", {}))
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        cells = [_contents(c) for c in value.__closure__ or ()]
        outer = [value.__globals__[n] for n in _globals_of(value.__code__) if n in value.__globals__]
        return value.__defaults__, value.__kwdefaults__, cells, outer, vars(value)
    return None if isinstance(value, type) else dict(getattr(value, "__dict__", {}))


@functools.lru_cache(256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    return tuple(dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def objects(key: Hashable) -> Iterator[Same]:
    """The objects in a key, in order."""
    if isinstance(key, Same):
        yield key
    elif isinstance(key, tuple):
        for part in key:
            yield from objects(part)


def check(name: str, value: Any) -> Any:
    """``value``, which is neither tensor, container nor plain, where its key tells it from others.

    Raises AutoparError ``input-structure``, saying that it is part of the input ``name``.
    """
    kind = type(value).__name__
    if callable(value):
        if _learns(value):
            why = f"{name}: a {kind} has parameters, which would be frozen in the program"
            raise AutoparError("input-structure", why, "make the module a child of the model")
        return value
    if hasattr(value, "__array__") and not isinstance(value, Hashable):
        why = f"{name}: a {kind} is no tensor; its values would be frozen in the program"
        raise AutoparError("input-structure", why, "pass torch.as_tensor(value)")
    by_value = isinstance(value, Hashable) and type(value).__eq__ is not object.__eq__
    if by_value and not hasattr(value, "__dict__"):
        return value
    raise AutoparError(
        "input-structure",
        f"{name}: a {kind} is no tensor, container, dataclass or plain value",
        "pass tensors in dicts, lists, tuples or dataclasses; leave caches out",
    )


def _learns(value: Any) -> bool:
    """Whether a callable is, or holds, a module with parameters."""
    if isinstance(value, nn.Module):
        return any(True for _ in value.parameters())
    if isinstance(value, MethodType):  # what else its object holds may be the model itself, not used here
        return isinstance(value.__self__, nn.Module) and _learns(value.__self__)
    held = _held(value) if callable(value) else value
    if isinstance(held, Mapping):
        held = list(held.values())
    parts = held if isinstance(held, (list, tuple)) else [held]
    kinds = (nn.Module, functools.partial, MethodType, list, tuple, Mapping)
    return any(_learns(p) for p in parts if isinstance(p, kinds))
