"""Cuts of a chain: by dynamic programming; by enumeration or descent where stages share the memory of their ranks.

Tables are by (first place, place behind the last one) of a stage, a place being where a stage may begin or end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Cuts = NDArray[np.int64]
Row = tuple[tuple[int, ...], tuple[int, ...]]
FEW = 20_000  # cuts that are enumerated
DIGITS = 9  # of a score; sums that were added in another order differ beyond


def least_maximum(tables: Sequence[Matrix]) -> float:
    """The least possible maximum of a value of each stage; infinity where there is no cut."""
    best = np.full(len(tables[0]), np.inf)
    best[0] = 0.0
    for table in tables:
        best = np.maximum(best[:, None], table).min(axis=0)
    return float(best[-1])


def least_sum(tables: Sequence[Matrix]) -> tuple[int, ...] | None:
    """The first places of the stages with the least sum of a value of each; the first ones where equal."""
    best = np.full(len(tables[0]), np.inf)
    best[0] = 0.0
    chosen = []
    for table in tables:
        total = best[:, None] + table
        chosen.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if best[-1] == np.inf:
        return None
    at, starts = len(best) - 1, []
    for choice in reversed(chosen):
        at = int(choice[at])
        starts.append(at)
    return tuple(reversed(starts))


@dataclass(frozen=True)
class Coupled:
    """A chain whose stages share the memory of their ranks.

    Args:
        rows: (stages of a rank, microbatches alive of each) at each of its fullest moments.
        seconds: as parts of what is best without memory. states, activations: bytes, as parts of the limit.
    """

    rows: Sequence[Row]
    seconds: Matrix
    states: Matrix
    activations: Matrix
    stages: int

    def best(self, *starts: Sequence[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The best cut, and its score: of all where they are few, else what descents from ``starts`` reach.

        The score is (bytes beyond the limit, slowest stage, sum of squares), each as parts; less is better, in this
        order.
        """
        inner = range(1, len(self.seconds) - 1)
        if comb(len(inner), self.stages - 1) <= FEW:
            every = np.array([(0, *cut) for cut in combinations(inner, self.stages - 1)])
            scores = self._scores(every)
            first = np.lexsort(scores.T[::-1])[0]
            return tuple(int(i) for i in every[first]), tuple(float(x) for x in scores[first])
        return min((self._descend(s) for s in starts), key=lambda found: found[1])

    def _descend(self, starts: Sequence[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The best cut that is reached from ``starts`` by moving one unit from a stage to another, and its score.

        The stages between the two pass a unit on, so for equal blocks a step changes nothing else.
        """
        best = np.array([starts])
        score = self._scores(best)[0]
        while True:
            near = best + self._moves
            ends = np.append(near[:, 1:], np.full((len(near), 1), len(self.seconds) - 1), axis=1)
            near = near[(near < ends).all(axis=1)]
            if not len(near):
                break
            scores = self._scores(near)
            first = np.lexsort(scores.T[::-1])[0]
            if tuple(scores[first]) >= tuple(score):
                break
            best, score = near[first : first + 1], scores[first]
        return tuple(int(i) for i in best[0]), tuple(float(x) for x in score)

    @cached_property
    def _moves(self) -> Cuts:
        """What to add to the starts, one row a move: a run of cuts goes one place back or ahead."""
        rows = []
        for a, b in combinations(range(1, self.stages + 1), 2):
            for step in (-1, 1):
                rows.append([step if a <= s < b else 0 for s in range(self.stages)])
        return np.array(rows, dtype=np.int64).reshape(-1, self.stages)

    @cached_property
    def _weights(self) -> tuple[Matrix, Matrix]:
        """[stage, row]: 1 where the row's rank holds the stage, and its microbatches alive."""
        holds, alive = np.zeros((self.stages, len(self.rows))), np.zeros((self.stages, len(self.rows)))
        for row, (stages, counts) in enumerate(self.rows):
            holds[list(stages), row] = 1
            alive[list(stages), row] = counts
        return holds, alive

    def _scores(self, starts: Cuts) -> Matrix:
        """[cut, 3] for the first places of the stages, [cut, stage]."""
        ends = np.append(starts[:, 1:], np.full((len(starts), 1), len(self.seconds) - 1), axis=1)
        states, activations, seconds = (t[starts, ends] for t in (self.states, self.activations, self.seconds))
        holds, alive = self._weights
        beyond = np.maximum(states @ holds + activations @ alive - 1, 0).sum(axis=1)
        return np.round(np.stack([beyond, seconds.max(axis=1), np.square(seconds).sum(axis=1)], axis=1), DIGITS)
