"""What the code of modules remembers outside of them: functions with caches, containers of modules and classes."""

import dis
import functools
import inspect
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.trace import places
from autopar.trace.state import ABSENT, inside, refill, same, tensors_in

CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, set, deque))  # no others, that may act when looked into


@dataclass
class Change:
    """A global, an attribute of a class, or what a container of either holds: before a forward and after it."""

    where: str
    owner: Any  # of the name; the container itself where its contents changed
    name: str | None
    before: Any
    after: Any

    def put(self, value: Any) -> None:
        """Make it ``before`` or ``after``."""
        if self.name is None:
            refill(self.owner, value)
        elif value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


@contextmanager
def met(changes: Sequence[Change]) -> Iterator[None]:
    """While the context lasts, everything is as it was after the changes."""
    try:
        for change in changes:
            change.put(change.after)
        yield
    finally:
        for change in changes:
            change.put(change.before)


@dataclass
class Memories:
    """Caches, containers and names at one moment, and what they knew."""

    caches: list[tuple[Any, int]]  # functions of functools.lru_cache, with how often they computed
    containers: list[tuple[str, Any, Any]]  # with where they are, and what they held
    names: list[tuple[Any, dict[str, Any]]]  # of Python modules and classes, with their values

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> "Memories":
        """Those in the classes of the modules and in the files where these and what they import are written."""
        classes = {c for kind in {type(m) for m in modules} for c in kind.__mro__ if _is_user(c.__module__)}
        files = {c.__module__: sys.modules[c.__module__] for c in classes}
        for module in list(files.values()):
            files |= {n: sys.modules[n] for n in map(_module, list(vars(module).values())) if n and _is_user(n)}
        every = [(owner, _plain(owner)) for owner in (*files.values(), *classes)]
        held = [(_place(owner, n), v) for owner, own in every for n, v in own.items()]
        names = [(owner, _assigned(owner, own)) for owner, own in every]
        found = {id(v): v for v in (_unwrapped(v) for _, v in held) if isinstance(v, functools._lru_cache_wrapper)}
        containers = {id(v): (where, v, inside(v)) for where, v in held if type(v) in CONTAINERS}
        return cls([(c, c.cache_info().misses) for c in found.values()], list(containers.values()), names)

    def changes(self) -> list[Change]:
        """What is not as it was, but for caches, code (that is imported late), and containers that took tensors."""
        out = [
            Change(where, container, None, before, inside(container))
            for where, container, before in self.containers
            if not same(inside(container), before) and not _took(container, before)
        ]
        for owner, before in self.names:
            now = _assigned(owner, _plain(owner))
            for name in {**before, **now}:
                pair = before.get(name, ABSENT), now.get(name, ABSENT)
                if not same(*pair) and not any(_is_code(v) for v in pair):
                    out.append(Change(_place(owner, name), owner, name, *pair))
        return out

    def restore(self) -> None:
        """Forget what was cached since, and put back names and containers."""
        for cache, misses in self.caches:
            if cache.cache_info().misses > misses:
                cache.cache_clear()
        for change in self.changes():
            change.put(change.before)
        for _, container, before in self.containers:
            refill(container, before)


def _plain(owner: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(owner).items() if not n.startswith("__")}


def _assigned(owner: Any, held: dict[str, Any]) -> dict[str, Any]:
    """What a forward may assign: an attribute of a class, a global that a function there declares as such."""
    if isinstance(owner, type):
        return held
    files = _globals_of if owner.__name__ != "__main__" else _globals_of.__wrapped__  # that one still grows
    return {n: held[n] for n in files(owner) if n in held}


@functools.lru_cache(maxsize=4096)
def _globals_of(file: types.ModuleType) -> frozenset[str]:
    """The globals that functions and methods of a file assign."""
    spaces = [file, *(v for v in vars(file).values() if isinstance(v, type) and v.__module__ == file.__name__)]
    functions = (inspect.unwrap(_unwrapped(v)) for space in spaces for v in list(vars(space).values()) if callable(v))
    todo = [f.__code__ for f in functions if isinstance(f, types.FunctionType) and f.__module__ == file.__name__]
    found: set[str] = set()
    while todo:
        code = todo.pop()
        todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        if dis.opmap["STORE_GLOBAL"] in code.co_code[::2]:
            found |= {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    return frozenset(found)


def _place(owner: Any, name: str) -> str:
    return f"{owner.__qualname__ if isinstance(owner, type) else owner.__name__}.{name}"


def _is_code(value: Any) -> bool:
    return value is not ABSENT and (callable(value) or isinstance(value, (type(sys), staticmethod, classmethod)))


def _took(container: Any, before: Any) -> bool:
    """Whether it has tensors that it did not have."""
    known = {id(x) for x in tensors_in(before)}
    return any(id(x) not in known for x in tensors_in(container))


def _unwrapped(value: Any) -> Any:
    """The function behind ``staticmethod`` and ``classmethod``."""
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _module(value: Any) -> str | None:
    """The name of the Python module that a global is, or is from."""
    name = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", None)
    return name if isinstance(name, str) and name in sys.modules else None


def _is_user(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.modules and (name == "__main__" or file is not None and places.is_user(file))
