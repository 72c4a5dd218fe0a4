"""The closed forms of one program at its own sizes: numbers, priced by what prices families.

A family's layouts are those that suit its example; a program's are what the passes chose for its own rows, positions
and mesh, and its stages are those that it was cut into.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.cost.closed import Family, Message, Unit
from autopar.cost.family import Sizes, family, sides_of
from autopar.cost.keep import FIRST, LAST
from autopar.cost.shares import check_priced, mesh_sizes
from autopar.cost.symbols import Number
from autopar.ir.mesh import TIME, Mesh
from autopar.ir.program import Program


@dataclass(frozen=True)
class Own:
    """The sizes of a program on its mesh, of one microbatch. ``positions`` as in ``Sizes``."""

    mesh: Mesh
    positions: int | None
    own: ClassVar[bool] = True

    @property
    def axes(self) -> Mapping[str, Number]:
        """Ranks along each axis, and microbatches."""
        return {**mesh_sizes(self.mesh), TIME: self.mesh.microbatches}

    def size(self, length: int) -> Number:
        """The size itself."""
        return length

    def place(self, axis: str) -> tuple[str, tuple[int, int] | None]:
        """See ``Sizes``."""
        base = self.mesh.base(axis)
        parts = self.mesh.parts(base)
        if len(parts) == 1:
            return base, None
        apart = 1
        for minor in parts[parts.index(axis) + 1 :]:
            apart *= self.mesh.size(minor)
        return base, (self.mesh.size(axis), apart)


def exact(program: Program, prologue: Program | None, *, sequence: bool, positions: int | None) -> Family:
    """The family of one RESHARDED program, that of a microbatch where the step has several.

    Args:
        prologue: what the step computes once. sequence: whether positions are sharded over tp. positions: of a row.

    Raises AutoparError ``unpriced-form``, ``missing-layout``.
    """
    check_priced(program)
    made = family(program, Own(program.mesh, positions), sequence=sequence)
    if prologue is not None:
        check_priced(prologue)
        before = family(prologue, Own(prologue.mesh, positions), sequence=sequence)
        made = replace(made, units=_with_prologue(made.units, before.units, program.mesh.microbatches))
    return replace(made, cut=_cut(program, made)) if program.stages is not None else made


def _with_prologue(units: Sequence[Unit], before: Sequence[Unit], steps: int) -> tuple[Unit, ...]:
    """The last unit also has its part of what is computed once, and sends its messages."""
    sent: list[Message] = [replace(m, given=True) for u in before for m in u.messages]
    work = [(n / steps, kernel) for u in before for n, kernel in u.kernels]
    last = units[-1]
    last = replace(last, messages=(*last.messages, *sent), kernels=(*last.kernels, *work))
    return (*units[:-1], last)


def _cut(program: Program, made: Family) -> tuple[int, ...]:
    """The stage of each unit call; none where a stage has a part of a unit alone."""
    sides = sides_of(program)
    calls = [int(c.meta["stage"]) for c in program.calls()]

    def ends(side: str) -> list[int]:
        return [
            n.meta["stage"] for n, at in sides.items() if at == side and n.op == "call_function" and "stage" in n.meta
        ]

    first, last = min([0, *ends(FIRST)]), max([*ends(LAST), *calls[-1:]], default=0)
    found = (first, *calls, last)
    assert program.stages is not None and len(found) == len(made.order) + 2
    return found if set(found) == set(range(len(program.stages.names))) else ()


__all__ = ["Own", "Sizes", "exact"]
