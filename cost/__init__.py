"""What a program costs: flops, bytes on the wire, seconds and memory, as numbers or as sympy expressions."""

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
