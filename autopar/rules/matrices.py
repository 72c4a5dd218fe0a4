"""Relations of ops on matrices, or on sorted rows, one by one."""

from torch import fx

from autopar.rules.builders import input_shapes, numbered, output_shapes, rule
from autopar.rules.relation import Labels, Opaque, Relation


def matrices(node: fx.Node) -> Relation:
    """Inverses, factorizations, solutions: of the last two dims of each operand; the dims in front pass."""
    first, *others = ins = input_shapes(node)
    lead = first[:-2]
    if any(s and s[: len(lead)] != lead for s in others):
        return Opaque()
    names = tuple(numbered(len(lead)))
    binds = [
        (*names, *(f"own{i}{d}" for d in range(len(s) - len(lead)))) if s else ()
        for i, s in enumerate((*ins, *output_shapes(node)))
    ]
    blocked = frozenset(n for bind in binds for n in bind if n and n.startswith("own"))
    return Labels(tuple(binds[: len(ins)]), tuple(binds[len(ins) :]), blocked)


def searched(node: fx.Node) -> Relation:
    """searchsorted: values in one sorted row, or each row of them in a row of its own."""
    bounds, _, *more = input_shapes(node)
    if more:
        return Opaque()
    return rule("!n, b.. -> b.." if len(bounds) == 1 else "b.. !n, b.. !m -> b.. !m")(node)
