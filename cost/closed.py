"""Closed forms as data: what each piece of a model computes, sends and holds under one set of layouts.

``cost.family`` makes them of a program, ``cost.stored`` keeps them as text. To read them takes neither torch nor sympy.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.cost.polynomials import Expression


@dataclass(frozen=True)
class Kernel:
    """Work of one launch on one rank, forward and backward: flops, bytes moved.

    Args:
        kind: matmul, attention, memory, or rows (memory, where rows are sorted). dims: (m, n, k) of a matmul, sizes of
            a head's query and value of attention. dtype: name of that it computes in.
    """

    kind: str
    flops: "tuple[Expression, Expression]"
    bytes: "tuple[Expression, Expression]"
    dims: "tuple[Expression, Expression, Expression] | None"
    dtype: str


@dataclass(frozen=True)
class Message:
    """A collective of one unit on one mesh axis: bytes of the whole value; ``again``: a repeated gather.

    ``calls``: how often a call of the unit issues it; what stands between two blocks counts as a part. ``given``: of
    what inputs alone make (a count of tokens), which every context rank has for all positions. ``part``: of a message
    on a part of the axis, how many ranks that has, and how far apart they are numbered along the axis.
    """

    axis: str
    collective: str
    when: str
    bytes: "Expression"
    again: bool = False
    calls: float = 1
    given: bool = False
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Copies:
    """What a conversion along an axis copies on a rank besides what travels (``cost.copies``).

    Args:
        bytes: read and written, wherever the axis has several ranks. major: elements of the dims before the one that is
            shared out, with one of which nothing is copied. calls: how often a call of the unit does so.
        context: whether only with several ranks along cp, which hold positions in two runs, or only without; None where
            that does not matter.
    """

    axis: str
    when: str
    bytes: "Expression"
    major: "Expression"
    calls: float = 1
    context: bool | None = None


@dataclass(frozen=True)
class Unit:
    """A kind of block, or what stands before (``first``) or behind (``last``) the blocks; per call and microbatch.

    Args:
        calls: instances in the model. kernels, messages: what runs and what is sent.
        parameters: elements on one rank by the data axes over which gradients are summed (``dp+ep``, or ``dp``).
        activations: bytes kept for the backward, where nothing, matmuls and attention, or inputs alone are kept
            ("none", "selective", "full" recompute); the others as ``cost.keep.keeps`` says.
        hidden: bytes of what goes on to the next unit. heads: (query bytes, key and value bytes) of attention.
        dispatches: bytes held for a moment while rows travel to experts and back, by the axis that they travel along.
        copies: of conversions, besides what they send.
    """

    name: str
    calls: int
    kernels: tuple[tuple[float, Kernel], ...]
    messages: tuple[Message, ...]
    parameters: "dict[str, Expression]"
    activations: "dict[str, Expression]"
    hidden: "Expression"
    heads: "tuple[Expression, Expression]"
    dispatches: "dict[str, Expression]" = field(default_factory=dict)
    copies: tuple[Copies, ...] = ()


@dataclass(frozen=True)
class Family:
    """Closed forms of one set of layouts.

    Args:
        sequence: whether positions are sharded over ``tp``. units: first, blocks in order of the model, last.
        order: the unit's index of each block call. divisors: by axis, lengths that its size must divide.
        tied: elements that both first and last unit hold. length: whether there are positions to shard.
        parts: whether a step can run in microbatches.
        own: whether these are numbers of one program at its own sizes, whose context ranks are in it.
        cut: the stage of each unit call (first, blocks in order, last) where the program is cut; else by ``Forms``.
    """

    sequence: bool
    units: tuple[Unit, ...]
    order: tuple[int, ...]
    divisors: dict[str, frozenset[int]]
    tied: "Expression" = 0
    length: bool = True
    parts: bool = True
    own: bool = False
    cut: tuple[int, ...] = ()

    def allows(self, axis: str, size: int) -> bool:
        """Whether the layouts hold with so many ranks along the axis."""
        return all(n % size == 0 for n in self.divisors.get(axis, ()))
