"""What a pass is, and what it may ask of its surroundings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from autopar.cost.hardware import Hardware, load
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Program


@dataclass
class Context:
    """What passes may read besides the program.

    Args:
        hardware: profile that prices ops and conversions.
        pinned: layouts that parameters already have, by name (a retrace must keep them).
        mesh: the mesh of those layouts, sub-axes included; None where nothing is pinned yet.
        stages: the pipeline stages that parameters already live in, by name.
        strict: an op without a rule is an error instead of a warning.
        at: coordinates of the rank that ``localize`` lowers for.
        unread: names of parameters that the trace which chose those layouts did not read.
        warnings: messages for the user, each said once by the caller.
    """

    hardware: Hardware = field(default_factory=lambda: load("h100"))
    pinned: Mapping[str, Layout] = field(default_factory=dict)
    strict: bool = False
    at: Mapping[str, int] = field(default_factory=dict)
    mesh: Mesh | None = None
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """A rewrite of a Program; its fields are its options. The runner hands it a clone and verifies the result."""

    name: ClassVar[str]
    requires: ClassVar[Form]
    produces: ClassVar[Form]

    def idle(self, program: Program) -> bool:
        """Whether there is nothing to do, since the mesh lacks the pass's axis."""
        return False

    def rewrite(self, program: Program, context: Context) -> Program:
        """The rewritten program; ``program`` may be changed in place and returned."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Pipeline text: the name, then the options that differ from their defaults."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        words = [n.replace("_", "-") + ("" if v is True else f"={_text(v)}") for n, v in changed]
        return self.name + (f"{{{' '.join(words)}}}" if words else "")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
