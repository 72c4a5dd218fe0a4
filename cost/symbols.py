"""Numbers that may be symbols: the helpers that let one formula serve floats and sympy expressions alike."""

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import sympy

Number: TypeAlias = int | float | sympy.Expr

BATCH = sympy.Symbol("B", integer=True, positive=True)
SEQUENCE = sympy.Symbol("S", integer=True, positive=True)


def axis_size(axis: str) -> sympy.Symbol:
    """The symbol for the number of ranks along a mesh axis: ``tp`` itself."""
    return sympy.Symbol(axis, integer=True, positive=True)


def axis_sizes(axes: Iterable[str]) -> dict[str, Number]:
    """Each axis with its symbol, as the ``sizes`` of a closed form."""
    return {axis: axis_size(axis) for axis in axes}


def is_symbolic(value: Number) -> bool:
    """Whether the value is an expression rather than a plain number."""
    return isinstance(value, sympy.Basic)


def ratio(numerator: Number, denominator: Number) -> Number:
    """Quotient that stays an int where it is one, so that byte counts are exact."""
    if isinstance(numerator, int) and isinstance(denominator, int):
        whole, rest = divmod(numerator, denominator)
        return numerator / denominator if rest else whole
    return numerator / denominator


def maximum(*values: Number) -> Number:
    """The largest value; ``sympy.Max`` where one is an expression."""
    if any(is_symbolic(v) for v in values):
        return sympy.Max(*values)
    return max(values)


def several(ways: Number) -> Number:
    """1 where there is more than one rank, 0 for a single one: the factor of costs that do not depend on size."""
    return sympy.sign(ways - 1) if is_symbolic(ways) else int(ways > 1)


def product(values: Iterable[Number]) -> Number:
    """Product, 1 for none."""
    return math.prod(values)


def evaluate(value: Number, values: Mapping[str, float]) -> float:
    """An expression at given values of its symbols (by symbol name), as a float.

    Raises KeyError where a symbol has no value.
    """
    if not is_symbolic(value):
        return float(value)
    expression = sympy.sympify(value)
    return float(expression.subs({s: values[s.name] for s in expression.free_symbols}))
