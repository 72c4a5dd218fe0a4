"""The factor notation of the rule table, as in einsum.

    "b.. i, o i, [+o] -> b.. o"

Operands are separated by commas, dims by blanks. ``b..`` stands for any number of dims; they are aligned from the
right as
in broadcasting. ``!s`` is a factor that must not be sharded. ``[..]`` is an operand that may be missing, ``+`` one
that is added to the result. A factor that only inputs have is summed over. Factors of size 1 in an operand broadcast.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from autopar.rules.relation import Dims, Labels

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """One side's operand: its factors, and whether it may be missing or is added."""

    factors: tuple[str, ...]
    optional: bool
    added: bool


@dataclass(frozen=True)
class Rule:
    """A parsed line of the table."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    blocked: frozenset[str]


@lru_cache(maxsize=None)
def parse(text: str) -> Rule:
    """Parse a rule. Raises ValueError with the text where it does not read."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"rule {text!r} needs one ->")
    blocked: set[str] = set()

    def operand(part: str) -> Operand:
        match = re.fullmatch(r"\s*(\[)?\s*(\+)?\s*([\w!. ]*?)\s*(\])?\s*", part)
        if not match or bool(match[1]) != bool(match[4]):
            raise ValueError(f"rule {text!r}: cannot read operand {part!r}")
        factors = match[3].split()
        blocked.update(f[1:].removesuffix("..") for f in factors if f.startswith("!"))
        return Operand(tuple(f.removeprefix("!") for f in factors), bool(match[1]), bool(match[2]))

    left = tuple(operand(p) for p in sides[0].split(",")) if sides[0].strip() else ()
    right = tuple(operand(p) for p in sides[1].split(","))
    return Rule(left, right, frozenset(blocked))


def labels(text: str, inputs: list[Shape], outputs: list[Shape], linear: tuple[frozenset[int], ...] = ()) -> Labels:
    """The relation of ``text`` for an op with these shapes."""
    rule = parse(text)
    wanted = len(inputs)
    operands = [o for o in rule.inputs if not o.optional]
    for o in rule.inputs:
        if o.optional and len(operands) < wanted:
            operands = [x for x in rule.inputs if x in operands or x is o]
    assert len(operands) == wanted, (text, inputs)
    ins = tuple(bind(o, s) for o, s in zip(operands, inputs))
    outs = tuple(bind(o, s) for o, s in zip(rule.outputs, outputs))
    blocked = frozenset(
        n
        for d in (*ins, *outs)
        for n in d
        if n is not None and (n in rule.blocked or n.rstrip("0123456789") in rule.blocked)
    )
    added = frozenset(i for i, o in enumerate(operands) if o.added)
    return Labels(ins, outs, blocked, added, linear)


def bind(operand: Operand, shape: Shape) -> Dims:
    """A label for every dim of ``shape``; None where the size is 1, which broadcasts."""
    factors = list(operand.factors)
    open_at = next((i for i, f in enumerate(factors) if f.endswith("..")), None)
    if open_at is not None:
        name = factors[open_at][:-2]
        many = len(shape) - (len(factors) - 1)
        assert many >= 0, (operand, shape)
        factors[open_at : open_at + 1] = [f"{name}{many - 1 - k}" for k in range(many)]
    assert len(factors) <= len(shape) or not shape, (operand, shape)
    factors = factors[-len(shape) :] if shape else []
    return tuple(f if n != 1 else None for f, n in zip(factors, shape, strict=True))
