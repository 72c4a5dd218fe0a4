"""Closed forms of a family as tables: what each unit computes, sends and holds, in letters and at given sizes."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any

import sympy
from rich.table import Table

from autopar.cost.closed import Family, Unit
from autopar.cost.communication import collective_bytes
from autopar.cost.family import AXES
from autopar.cost.forms import POLICIES
from autopar.cost.polynomials import Terms
from autopar.cost.symbols import Number, evaluate
from autopar.cost.table import size

HELD = {
    **{policy: f"activations, recompute={policy}" for policy in POLICIES},
    "again": "made again for a moment, recompute=selective",
    "sent": "of recompute=selective, results of collectives",
    "transient": "alive for a moment in the backward, tp > 1",
    "alone": "alive for a moment in the backward, tp = 1",
    "scores": "kept by attention besides its inputs and result",
}
"""What is held, by its name in ``Unit.activations``."""


def formulas(family: Family, at: Mapping[str, float] | None = None) -> Iterator[Table]:
    """A table for each unit: flops, bytes on the wire by axis, bytes held; of one rank, one call and one microbatch.

    Letters: ``b`` rows and ``s`` positions of a rank, and the sizes of the axes. ``at``: their values, by which each
    form is computed, too; what does not hold or comes to nothing there is left out.
    """
    for unit in family.units:
        table = Table(
            title=f"{unit.name}  × {unit.calls}", title_justify="left", title_style="bold", header_style="bold cyan"
        )
        table.add_column("term")
        table.add_column("closed form", overflow="fold")
        if at is not None:
            table.add_column("value", justify="right")
        for term, value in terms(unit).items():
            if at is None:
                table.add_row(term, tidy(value))
            elif _holds(term, at) and (number := evaluate(value, at)):
                table.add_row(term, tidy(value), _value(term, number))
        if table.row_count:
            yield table


def terms(unit: Unit) -> dict[str, Number]:
    """Every term of a unit's cost that is not zero: flops by kind, bytes by collective, bytes held."""
    out: dict[str, Number] = defaultdict(int)
    made: Any = _symbolic(unit)
    for count, kernel in made.kernels:
        for part, flops, moved in zip(("forward", "backward"), kernel.flops, kernel.bytes):
            if kernel.kind not in ("memory", "rows"):
                keys = AXES["cp"] if kernel.kind == "attention" else 1  # those of all its ranks
                out[f"{kernel.kind} flops, {part}"] += count * keys * flops
            out[f"memory traffic, {part}"] += count * moved
    for m in made.messages:
        sent = m.calls * collective_bytes(m.collective, m.bytes, AXES[m.axis])
        out[f"{m.axis} {m.collective}, {m.when}{' again' if m.again else ''}"] += sent
    for c in made.copies:
        where = {None: "", False: ", cp = 1", True: ", cp > 1"}[c.context]
        out[f"copies beside {c.axis} collectives, {c.when}{where}"] += c.calls * c.bytes
    for axes, elements in made.parameters.items():
        out[f"parameters summed over {axes or 'none'}"] += elements
    for name, held in made.activations.items():
        out[HELD[name]] += held
    for axis, held in made.dispatches.items():
        out[f"rows on their way to experts, {axis}"] += held
    return {term: value for term, value in out.items() if value != 0}


def _holds(term: str, at: Mapping[str, float]) -> bool:
    """Whether what a term says of an axis (``tp > 1``) is so."""
    said = re.search(r"(\w+) ([=>]) 1$", term)
    axis = re.match(r"copies beside (\w+)", term)
    return not (said and (at[said[1]] > 1) != (said[2] == ">")) and not (axis and at[axis[1]] == 1)


def _value(term: str, value: float) -> str:
    if "flops" in term:
        return f"{value / 1e12:.4g} TFLOP" if value >= 1e10 else f"{value / 1e6:.4g} MFLOP"
    return f"{value:,.0f}" if term.startswith("parameters") else size(value)


def _symbolic(value: Any) -> Any:
    """With expressions in place of those that were read from text."""
    if isinstance(value, Terms):
        letters = {name: AXES.get(name) or _letter(name) for _, powers in value.terms for name, _ in powers}
        return sum(
            (sympy.nsimplify(f, rational=True) * prod(letters[n] ** p for n, p in powers) for f, powers in value.terms),
            start=sympy.Integer(0),
        )
    if isinstance(value, tuple):
        return tuple(map(_symbolic, value))
    if isinstance(value, dict):
        return {name: _symbolic(v) for name, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _symbolic(getattr(value, f.name)) for f in fields(value)})
    return value


def _letter(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def tidy(value: Number) -> str:
    """An expression as short text, factored where it is one product."""
    expression: Any = sympy.nsimplify(sympy.sympify(value), rational=True)
    return str(sympy.collect(sympy.expand(expression), list(AXES.values()))).replace("**", "^")
