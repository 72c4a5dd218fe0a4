"""What a program costs: flops, bytes on the wire, seconds and memory, as numbers or as sympy expressions."""

from typing import TYPE_CHECKING

from autopar.lazy import lazily

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
# A search of closed forms needs no programs, and so no torch.
__getattr__, __dir__ = lazily(__name__, _PLACES, ["price"])
