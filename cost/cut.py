"""Which units each rank of a pipeline holds, as numbers: the first look of the search, before units are timed."""

from functools import lru_cache
from typing import Any

import numpy as np

from autopar.cost.family import Family, Unit
from autopar.cost.polynomials import Array, Polynomials


def stages_of(family: Family, ranks: int, virtual: int, even: bool) -> Array:
    """[ranks, units]: how many calls of each unit a rank holds.

    ``even``: equally many blocks a stage; else contiguous stages whose slowest has the least work.
    """
    weights = [_weight(u) for u in family.units]
    chain = (0, *family.order, len(family.units) - 1)
    stages = ranks * virtual
    blocks = len(family.order)
    if even or stages == 1 or len(chain) <= stages:
        starts = [round(i * blocks / stages) + (i > 0) for i in range(stages)]
    else:
        starts = list(balanced(tuple(weights[u] for u in chain), stages))
    out = np.zeros((ranks, len(family.units)))
    for stage, start in enumerate(starts):
        end = starts[stage + 1] if stage + 1 < stages else len(chain)
        for unit in chain[start:end]:
            out[stage % ranks, unit] += 1
    return out


@lru_cache(maxsize=4096)
def balanced(weights: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Starts of contiguous stages whose largest sum is least; the earlier stages are as full as that allows."""
    low, high = max(weights), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(weights, middle) <= stages else (middle, high)
    return _starts(weights, high, stages)


def _filled(weights: tuple[float, ...], limit: float) -> int:
    stages, load = 1, 0.0
    for w in weights:
        if load + w > limit:
            stages, load = stages + 1, 0.0
        load += w
    return stages


def _starts(weights: tuple[float, ...], limit: float, stages: int) -> tuple[int, ...]:
    """As even as the limit allows: a stage ends at its share of what is left, or at the limit."""
    starts, at = [0], 0
    for stage in range(1, stages):
        left = sum(weights[at:])
        share, load = left / (stages - stage + 1), 0.0
        while at < len(weights) - (stages - stage):
            w = weights[at]
            if (
                load
                and (load + w > limit * (1 + 1e-9) or load + w / 2 > share)
                and _filled(weights[at:], limit * (1 + 1e-9)) <= stages - stage
            ):
                break
            load, at = load + w, at + 1
        starts.append(at)
    return tuple(starts)


def _weight(unit: Unit) -> float:
    """Flops of one call at a point of usual sizes."""
    point: dict[str, Any] = {"b": 1.0, "s": 4096.0, "tp": 1.0, "cp": 1.0, "ep": 1.0, "dp": 1.0}
    flops = [count * (k.flops[0] + k.flops[1]) for count, k in unit.kernels if k.kind != "memory"]
    return float(Polynomials.of([sum(flops)])(point)[0]) if flops else 0.0
