"""What a forward changes in its modules' plain attributes, which a compiled program does not carry to the next step."""

import linecache
import re
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.trace import places

Place = tuple[str, str]  # path of a module, name of its attribute
TENSORS = ("_parameters", "_buffers")
TAKEN = ("_buffers", True)  # what is assigned without being a write into the tensor that was there
HOOKS = tuple(n for n in vars(nn.Module()) if "hooks" in n and isinstance(vars(nn.Module())[n], dict))
INTERNAL = set(nn.Module().__dict__) - {"_modules", "training"} - set(TENSORS)  # hooks and the like
DEPTH = 4  # how deep containers and objects in attributes are looked into
MANY = 1000  # containers and objects of one attribute that are looked into


class ABSENT:
    """Stands for no attribute; a class, so that copies of it are it."""


@dataclass
class Snapshot:
    """The attributes of a model's modules at one moment, what containers and plain objects hold included."""

    modules: dict[str, nn.Module]
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    contents: dict[Place, list[tuple[Any, Any]]] = field(default_factory=dict)
    hooks: dict[Place, dict[Any, Any]] = field(default_factory=dict)  # no change by themselves, but put back

    @classmethod
    def of(cls, modules: dict[str, nn.Module]) -> "Snapshot":
        """The present state of the modules."""
        out = cls(modules)
        known: dict[int, list[tuple[Any, Any]]] = {}
        for path, module in modules.items():
            out.attributes[path] = _attributes(module)
            out.tensors |= {(path, kind): inside(module.__dict__[kind]) for kind in TENSORS}
            out.hooks |= {(path, kind): dict(module.__dict__[kind]) for kind in HOOKS if module.__dict__.get(kind)}
            for name, value in out.attributes[path].items():
                if id(value) not in known:
                    known[id(value)] = _contents(value)
                if known[id(value)]:
                    out.contents[path, name] = known[id(value)]
        return out

    def changed(self) -> list[Place]:
        """Attributes that are not what they were, with new and deleted ones, new tensors, and buffers of new shapes."""
        out = [place for place, held in self.contents.items() if any(not same(inside(c), old) for c, old in held)]
        for path, module in self.modules.items():
            now, before = _attributes(module), self.attributes[path]
            out += [(path, n) for n in {**before, **now} if not same(now.get(n, ABSENT), before.get(n, ABSENT))]
            for kind in TENSORS:
                held, old = inside(module.__dict__[kind]), self.tensors[path, kind]
                out += [
                    (path, n) for n in {**old, **held} if n not in old or n not in held or reshaped(old[n], held[n])
                ]
        return list(dict.fromkeys(out))

    def keep_tensors(self) -> None:
        """Buffers that were assigned: the new value is written into the tensor that was there, which is its update.

        One of another shape or dtype stays assigned, as attributes do. Raises AutoparError ``input-mutation`` for
        parameters, and for what carries a gradient.
        """
        for (path, kind), before in self.tensors.items():
            held = self.modules[path].__dict__[kind]
            for name in before:
                new = dict.get(held, name)
                if new is not None and new is not before[name] and (kind, reshaped(before[name], new)) != TAKEN:
                    _write_back(f"{path}.{name}" if path else name, kind, before[name], new)
                    held[name] = before[name]

    def restore(self, places: Collection[Place] | None = None) -> None:
        """Put everything back; or hooks and the attributes at ``places`` alone."""
        for place, held in self.contents.items():
            if places is None or place in places:
                for container, old in held:
                    refill(container, old)
        for (path, kind), tensors in self.tensors.items() if places is None else ():
            refill(self.modules[path].__dict__[kind], tensors)
        for path, module in self.modules.items():
            for kind in HOOKS:
                refill(module.__dict__.get(kind, {}), self.hooks.get((path, kind), {}))
            now, before = _attributes(module), self.attributes[path]
            for name in {**now, **before}:
                if places is None or (path, name) in places:
                    _put(module, name, now.get(name, ABSENT), before.get(name, ABSENT))


def _put(module: nn.Module, name: str, now: Any, before: Any) -> None:
    if before is ABSENT:
        del module.__dict__[name]
    elif now is not before:
        module.__dict__[name] = before


def reshaped(old: Any, new: Any) -> bool:
    """Whether a registered tensor has another shape or dtype than before, or there was none."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return old is not new
    return old.shape != new.shape or old.dtype != new.dtype


def _write_back(where: str, kind: str, old: Any, new: Any) -> None:
    """The value that was assigned to a buffer, as a write into it."""
    what = fix = ""
    if kind == "_parameters":
        what, fix = "a parameter", "use a plain tensor of another name, or change the parameter between steps"
    elif new.requires_grad:
        what, fix = "a buffer that carries a gradient into the next step", "assign value.detach()"
    if what:
        raise AutoparError("input-mutation", f"{where}: the forward assigns {what}", fix)
    with torch.no_grad():
        old.copy_(new)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in module.__dict__.items() if n not in INTERNAL and n not in TENSORS}


def inside(container: Any) -> Any:
    """A shallow copy of what a container or a plain object holds."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    if isinstance(container, (list, deque)):
        return list(container)
    return set(container) if isinstance(container, set) else dict(vars(container))


def refill(container: Any, old: Any) -> None:
    """Let a container, or a plain object, hold again what ``inside`` gave."""
    if not same(inside(container), old):
        held = container if isinstance(container, (dict, list, set, deque)) else vars(container)
        held.clear()
        held.extend(old) if isinstance(held, (list, deque)) else held.update(old)


def _contents(value: Any) -> list[tuple[Any, Any]]:
    """Containers and plain objects in a value, each with what it holds."""
    out: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    left = [(value, DEPTH)]
    while left and len(out) < MANY:
        one, depth = left.pop()
        if id(one) in seen or not depth or not _is_looked_into(one):
            continue
        seen.add(id(one))
        parts = inside(one)
        out.append((one, parts))
        left += [(part, depth - 1) for part in (parts.values() if isinstance(parts, dict) else parts)]
    return out


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an attribute: itself, or in its containers and plain objects."""
    if isinstance(value, Tensor):
        return [value]
    held = (parts.values() if isinstance(parts, dict) else parts for _, parts in _contents(value))
    return [x for parts in held for x in parts if isinstance(x, Tensor)]


def _is_looked_into(value: Any) -> bool:
    odd = (nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)
    if isinstance(value, odd) or type(value).__module__ == "builtins":
        return isinstance(value, (dict, list, set))
    return isinstance(value, (dict, list, set, deque)) or hasattr(value, "__dict__")


def same(a: Any, b: Any) -> bool:
    """Identity; equality for plain values and for containers of such."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (bool, int, float, complex, str, bytes)):
        return bool(a == b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, (set, frozenset)) and a == b


@dataclass
class Carried:
    """Attributes that one call left and the next one met: with the line that read them, or only updated further."""

    read: dict[Place, str] = field(default_factory=dict)
    updated: set[Place] = field(default_factory=set)


@contextmanager
def watched_attributes(model: nn.Module, modules: dict[str, nn.Module], changed: list[Place]) -> Iterator[Carried]:
    """Yields which attributes are read while the context lasts, except those written before that."""
    found, fresh = Carried(), {(id(modules[path]), name): (path, name) for path, name in changed}

    def getattribute(self: nn.Module, name: str) -> Any:
        place = fresh.get((id(self), name))
        if place is not None and place not in found.read and _is_watched(frame := sys._getframe(1)):
            if _updates(frame, name):
                found.updated.add(place)
            else:
                found.read[place] = places.here(model)
        return object.__getattribute__(self, name)

    plain = nn.Module.__setattr__

    def setattr_(self: nn.Module, name: str, value: Any) -> None:
        place = fresh.get((id(self), name))
        if place is not None and place not in found.updated and place not in found.read:
            del fresh[id(self), name]
        plain(self, name, value)

    try:
        nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign,assignment]
        nn.Module.__setattr__ = setattr_  # type: ignore[method-assign]
        yield found
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]


def _is_watched(frame: types.FrameType) -> bool:
    """Whether a reader counts: torch's own looks at modules (hooks, traversals) do not."""
    while frame.f_back is not None and frame.f_code.co_filename == nn.modules.module.__file__:
        frame = frame.f_back
    return places.is_user(frame.f_code.co_filename)


def _updates(frame: types.FrameType, name: str) -> bool:
    """Whether the line only writes the attribute on: ``self.n += 1``, ``self.log.append(x)``, ``self.d[k] = x``."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    word = re.escape(name)
    update = rf"\w+(\.\w+)*\.{word}(\s*[-+*/%&|^]+=|\.(append|extend|add|update|insert|clear)\(|\[[^\]]*\]\s*=(?!=))"
    return re.match(update, line) is not None and len(re.findall(rf"\.{word}\b", line)) == 1
