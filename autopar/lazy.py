"""Public names of a package that are loaded at their first use."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazily(
    package: str, places: Mapping[str, Iterable[str]], shadowed: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        places: module in the package: the public names that it has.
        shadowed: modules that bear the name of such a function: they are bound here once, and not again when others
            import from them.
    """
    for module in shadowed:
        importlib.import_module(f"{package}.{module}")
        vars(sys.modules[package]).pop(module)
    origin = {name: place for place, names in places.items() for name in names}

    def load(name: str) -> Any:
        if name not in origin:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{origin[name]}"), name)
        vars(sys.modules[package])[name] = found
        return found

    return load, lambda: sorted({*vars(sys.modules[package]), *origin})
