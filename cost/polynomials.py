"""Many closed forms at once on a grid of sizes: sums of products of powers, as two matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import sympy

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Terms:
    """A sum of products of powers: factors, and the powers that each multiplies."""

    terms: tuple[tuple[float, frozenset[tuple[str, int]]], ...]


Expression: TypeAlias = "int | float | sympy.Expr | Terms"


@dataclass(frozen=True)
class Polynomials:
    """Expressions as ``coefficients @ monomials``; exponents may be negative.

    Args:
        symbols: names of the variables. exponents: [monomials, variables]. coefficients: [expressions, monomials].
    """

    symbols: tuple[str, ...]
    exponents: Array
    coefficients: Array

    @staticmethod
    def of(expressions: Sequence[Expression]) -> "Polynomials":
        """From numbers and expressions. Raises ValueError for what is no sum of products of powers."""
        terms = [terms_of(e) for e in expressions]
        names = sorted({name for t in terms for powers in t for name, _ in powers})
        index: dict[frozenset[tuple[str, int]], int] = {}
        for t in terms:
            for powers in t:
                index.setdefault(powers, len(index))
        coefficients = np.zeros((len(expressions), len(index)))
        for row, t in enumerate(terms):
            for powers, factor in t.items():
                coefficients[row, index[powers]] = factor
        exponents = np.zeros((len(index), len(names)))
        for powers, at in index.items():
            for name, power in powers:
                exponents[at, names.index(name)] = power
        return Polynomials(tuple(names), exponents, coefficients)

    def __call__(self, values: Mapping[str, Any]) -> Array:
        """[expressions, points] for arrays of points. Raises KeyError where a variable has no value."""
        points = [np.asarray(values[name], dtype=np.float64) for name in self.symbols]
        shape = np.broadcast_shapes(*(np.shape(v) for v in values.values()))
        grid = np.ones((len(self.exponents), *shape))
        for column, point in enumerate(points):
            for power in np.unique(self.exponents[:, column]):
                if power:
                    grid[self.exponents[:, column] == power] *= point**power
        return np.tensordot(self.coefficients, grid, axes=1)


def terms_of(expression: Expression) -> dict[frozenset[tuple[str, int]], float]:
    """Factors by powers of the variables. Raises ValueError for what is no sum of products of powers."""
    if isinstance(expression, Terms):
        return {powers: factor for factor, powers in expression.terms}
    if isinstance(expression, Real):
        return {frozenset(): float(expression)} if expression else {}
    import sympy  # not loaded where forms come from text

    out: dict[frozenset[tuple[str, int]], float] = {}
    for product, factor in sympy.expand(expression).as_coefficients_dict().items():
        powers = []
        for base, power in product.as_powers_dict().items():
            if base == 1:
                continue
            if not base.is_Symbol or not power.is_Integer:
                raise ValueError(f"{expression} is no sum of products of powers")
            powers.append((base.name, int(power)))
        key = frozenset(powers)
        out[key] = out.get(key, 0.0) + float(factor)
    return out
