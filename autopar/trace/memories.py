"""What the code of modules remembers outside of them: functions with caches, containers of modules and classes."""

import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.trace import places
from autopar.trace.state import tensors_in

CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, set, deque))  # no others, that may act when looked into


@dataclass
class Memories:
    """Caches and containers at one moment, and what they knew."""

    caches: list[tuple[Any, int]]  # functions of functools.lru_cache, with how often they computed
    containers: list[tuple[Any, Any]]  # with what they held

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> "Memories":
        """Those in the classes of the modules and in the files where these and what they import are written."""
        classes = {c for kind in {type(m) for m in modules} for c in kind.__mro__ if _is_user(c.__module__)}
        files = {c.__module__: vars(sys.modules[c.__module__]) for c in classes}
        for names in list(files.values()):
            files |= {n: vars(sys.modules[n]) for n in map(_module, names.values()) if n and _is_user(n)}
        spaces = (*files.values(), *map(vars, classes))
        held = [v for names in spaces for n, v in names.items() if not n.startswith("__")]
        caches = {id(v): v for v in map(_unwrapped, held) if isinstance(v, functools._lru_cache_wrapper)}
        containers = {id(v): v for v in held if type(v) in CONTAINERS}
        return cls(
            [(c, c.cache_info().misses) for c in caches.values()],
            [(c, _inside(c)) for c in containers.values()],
        )

    def restore(self) -> None:
        """Forget what was cached since, and put back containers that took tensors since."""
        for cache, misses in self.caches:
            if cache.cache_info().misses > misses:
                cache.cache_clear()
        for container, before in self.containers:
            if _changed(container, before):
                known = {id(x) for x in tensors_in(before)}
                if any(id(x) not in known for x in tensors_in(container)):
                    container.clear()
                    container.update(before) if isinstance(container, (dict, set)) else container.extend(before)


def _inside(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _changed(container: Any, before: Any) -> bool:
    pairs = zip(_values(container), _values(before))
    return len(container) != len(before) or any(a is not b for a, b in pairs)


def _values(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


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
