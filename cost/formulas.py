"""Closed forms of a family as tables: what each unit computes, sends and holds, in letters."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import sympy
from rich.table import Table

from autopar.cost.closed import Family, Unit
from autopar.cost.communication import collective_bytes
from autopar.cost.family import AXES
from autopar.cost.symbols import Number


def formulas(family: Family) -> Iterator[Table]:
    """A table for each unit: flops, bytes on the wire by axis, bytes held; of one rank, one call and one microbatch.

    Letters: ``b`` rows and ``s`` positions of a rank, and the sizes of the axes.
    """
    for unit in family.units:
        table = Table(
            title=f"{unit.name}  × {unit.calls}", title_justify="left", title_style="bold", header_style="bold cyan"
        )
        table.add_column("term")
        table.add_column("closed form", overflow="fold")
        for term, value in terms(unit).items():
            table.add_row(term, tidy(value))
        yield table


def terms(unit: Unit) -> dict[str, Number]:
    """Every term of a unit's cost that is not zero: flops by kind, bytes by collective, bytes held."""
    out: dict[str, Number] = defaultdict(int)
    made: Any = unit  # of a program: its numbers are expressions, not those that were read from text
    for count, kernel in made.kernels:
        for part, flops, moved in zip(("forward", "backward"), kernel.flops, kernel.bytes):
            if kernel.kind != "memory":
                out[f"{kernel.kind} flops, {part}"] += count * flops
            out[f"memory traffic, {part}"] += count * moved
    for m in made.messages:
        sent = m.calls * collective_bytes(m.collective, m.bytes, AXES[m.axis])
        out[f"{m.axis} {m.collective}, {m.when}{' again' if m.again else ''}"] += sent
    for axes, elements in made.parameters.items():
        out[f"parameters summed over {axes or 'none'}"] += elements
    for policy, held in made.activations.items():
        out[f"activations, recompute={policy}"] += held
    for axis, held in made.dispatches.items():
        out[f"rows on their way to experts, {axis}"] += held
    return {term: value for term, value in out.items() if value != 0}


def tidy(value: Number) -> str:
    """An expression as short text, factored where it is one product."""
    expression: Any = sympy.nsimplify(sympy.sympify(value), rational=True)
    return str(sympy.collect(sympy.expand(expression), list(AXES.values()))).replace("**", "^")
