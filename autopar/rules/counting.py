"""The relation of ops that count values."""

from torch import fx

from autopar.rules.arguments import arguments, shape_of
from autopar.rules.builders import numbered
from autopar.rules.relation import Labels, Opaque, Relation


def histogram(node: fx.Node) -> Relation:
    """histc: counts of a part of the values are terms of all counts, where bins do not follow from the values."""
    known, shape = arguments(node), shape_of(node.args[0])
    if known["min"] == known["max"]:
        return Opaque()
    return Labels((tuple(numbered(len(shape))),), (("bin",),), frozenset({"bin"}))
