"""Candidates of a search, as columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost.polynomials import Array

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
ORDER = ("pp", "dp", "ep", "cp", "tp")


@dataclass(frozen=True)
class Candidates:
    """Columns that broadcast: of equal length, or one dim for each choice.

    Args:
        sizes: ranks by axis. rows: of a microbatch on one data rank. microbatches: of a step. zero: stage. shard: data
            ranks that share out a copy, 0 for all. recompute: index into ``forms.POLICIES``. schedule: index into
            ``SCHEDULES``. virtual: stages a rank. offload: 1 where states live in host memory. ulysses: 1, or 0: ring.
        positions: of the whole sequence. order: of the mesh, major to minor.
    """

    sizes: Mapping[str, Array]
    rows: Array
    microbatches: Array
    zero: Array
    shard: Array
    recompute: Array
    schedule: Array
    virtual: Array
    offload: Array
    ulysses: Array
    positions: float
    order: tuple[str, ...] = ORDER

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all columns together."""
        return np.broadcast_shapes(*(v.shape for v in self._columns.values()), *(v.shape for v in self.sizes.values()))

    @property
    def _columns(self) -> dict[str, Array]:
        return {n: v for n, v in vars(self).items() if isinstance(v, np.ndarray)}

    def take(self, where: Any) -> "Candidates":
        """Those at flat indices, as columns of equal length."""
        shape = self.shape
        at = np.unravel_index(where, shape)
        columns = {n: np.broadcast_to(v, shape)[at] for n, v in self._columns.items()}
        sizes = {axis: np.broadcast_to(v, shape)[at] for axis, v in self.sizes.items()}
        return Candidates(sizes=sizes, positions=self.positions, order=self.order, **columns)
