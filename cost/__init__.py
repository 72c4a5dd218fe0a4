"""What a program costs: flops, bytes on the wire, seconds and memory, as numbers or as sympy expressions."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.cost.hardware import Hardware, load
    from autopar.cost.price import Price, Traffic
    from autopar.cost.program import closed_form, price
    from autopar.cost.table import comparison, comparison_rows, to_csv, to_json, traffic_table

__all__ = [
    "Hardware",
    "Price",
    "Traffic",
    "closed_form",
    "comparison",
    "comparison_rows",
    "load",
    "price",
    "to_csv",
    "to_json",
    "traffic_table",
]

_PLACES = {
    "hardware": ("Hardware", "load"),
    "price": ("Price", "Traffic"),
    "program": ("closed_form", "price"),
    "table": ("comparison", "comparison_rows", "to_csv", "to_json", "traffic_table"),
}
importlib.import_module(f"{__name__}.price")  # a module that bears the name of a function: bound here, and not again
globals().pop("price")


def __getattr__(name: str) -> Any:
    """A public name, loaded at its first use: a search of closed forms needs no programs, and so no torch."""
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{place}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
