"""The relation of convolutions."""

from typing import Any

from torch import fx

from autopar.rules.arguments import arguments
from autopar.rules.builders import input_shapes, output_shapes
from autopar.rules.relation import Grouped, Labels


def convolution(node: fx.Node) -> Labels | Grouped:
    """n c .., o c .. -> n o ..: spatial dims of several taps are blocked. Groups of channels stay whole."""
    known = arguments(node)
    ins, out = input_shapes(node), output_shapes(node)[0]
    spatial, taps, outs = ([f"{kind}{i}" for i in range(len(ins[1]) - 2)] for kind in "xyz")
    batch = ["n"] * (len(out) - len(outs) - 1)
    groups, turned = known.get("groups", 1), bool(known.get("transposed"))
    weight = ["c", "o"] if turned else ["o", "c"]
    if groups != 1:
        weight[1] = "own"
    mixed = [i for i in range(len(outs)) if not _by_position(known, i, *(s[i - len(outs)] for s in (*ins[:2], out)))]
    outs = [z if i in mixed else spatial[i] for i, z in enumerate(outs)]
    dims = [(*batch, "c", *spatial), (*weight, *taps), ("o",)][: len(ins)]
    blocked = {*(spatial[i] for i in mixed), *taps, *(outs[i] for i in mixed), "own"}
    sets = ({0, 2}, {1, 2}) if len(ins) == 3 else ({0}, {1})
    labels = Labels(
        tuple(dims), ((*batch, "o", *outs),), frozenset(blocked), frozenset({2}), tuple(map(frozenset, sets))
    )
    at = len(batch)
    return labels if groups == 1 else Grouped(labels, groups, {"c": ins[0][at], "o": out[at]})


def _by_position(known: dict[str, Any], i: int, before: int, taps: int, after: int) -> bool:
    """Whether along the i-th spatial dim each position is made of the same one: one tap, nothing left out or added."""
    strides = known["stride"]
    stride = strides[i] if len(strides) > 1 else strides[0]
    return bool(taps == 1 and stride == 1 and before == after)
