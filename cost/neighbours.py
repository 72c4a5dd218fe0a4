"""What differs from an option in one respect, priced: why not a little more of this and a little less of that?"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from autopar.cost.candidates import ORDER, SCHEDULES, Candidates
from autopar.cost.forms import POLICIES, Forms
from autopar.cost.search import Option, Question
from autopar.cost.space import Degree, Grid, grids


def neighbours(option: Option, question: Question) -> list[tuple[str, Option]]:
    """For each single change (one field, or one factor of two moved between two axes) the best such option.

    Best first: the fastest that fits, else the smallest.
    """
    best: dict[str, Option] = {}
    for forms in question.forms:
        for grid in grids(question.space, forms.family, lambda degree: near(option, degree)):
            for change, other in _changes(option, question, forms, grid):
                if change not in best or order(other, question) < order(best[change], question):
                    best[change] = other
    return sorted(best.items(), key=lambda item: (order(item[1], question), item[0]))


def near(option: Option, degree: Degree) -> bool:
    """Whether the sizes are the option's, or differ by one factor of two between two axes."""
    ratios = sorted(n / option.sizes[a] for a, n in zip(ORDER, degree) if n != option.sizes[a])
    return ratios in ([], [0.5, 2.0])


def order(option: Option, question: Question) -> tuple[bool, float, float, object]:
    """What is better is less: what fits before what does not, then by time, or by memory."""
    fits = question.fits(option)
    return not fits, option.seconds if fits else option.peak, option.peak, option.key()


def _changes(option: Option, question: Question, forms: Forms, grid: Grid) -> Iterator[tuple[str, Option]]:
    """(what changed, option) of the grid's candidates that differ from the option in one respect."""
    legal = np.flatnonzero(grid.legal)
    c = grid.candidates.take(legal)
    moved = np.stack([c.sizes[a] != option.sizes[a] for a in ORDER])
    same = _same(option, c, forms)
    different = np.sum([~v for v in same.values()], axis=0)
    stay = ~moved.any(axis=0)
    chosen = {name: np.flatnonzero(stay & ~equal & (different == 1)) for name, equal in same.items()}
    for i in np.flatnonzero(~stay & (different == 0)):
        up = next(a for a in ORDER if c.sizes[a][i] > option.sizes[a])
        down = next(a for a in ORDER if c.sizes[a][i] < option.sizes[a])
        name = f"{down} to {up}"
        chosen[name] = np.append(chosen.get(name, np.zeros(0, int)), i)
    seconds, peak = (v.reshape(-1)[legal] for v in question.totals(forms, grid))
    filled = question.filled(peak, question.hosted(forms, grid)[legal])
    for name, rows in chosen.items():
        if len(rows):
            fastest = np.where(filled[rows] <= 1, seconds[rows], np.inf).argmin()
            few = sorted({int(rows[fastest]), int(rows[filled[rows].argmin()])})
            for other in question.options(forms, grid.candidates, legal[few]):
                yield name, other


def _same(option: Option, c: Candidates, forms: Forms) -> dict[str, Any]:
    """By respect, which candidates are like the option."""
    cp = np.where(c.ulysses == 1, "ulysses", "ring") == (option.context or "ring")
    return {
        "sequence parallelism": np.full(len(c.rows), forms.family.sequence == option.sequence),
        "rows of a microbatch": c.rows == option.rows,
        "ZeRO": (c.zero == option.zero) & (c.shard == option.shard),
        "recompute": c.recompute == POLICIES.index(option.recompute),
        "schedule": (c.schedule == SCHEDULES.index(option.schedule)) & (c.virtual == option.virtual),
        "offload": c.offload == option.offload,
        "context kind": cp | (option.sizes["cp"] == 1),
        "placement": np.full(len(c.rows), c.order == option.order),
    }
