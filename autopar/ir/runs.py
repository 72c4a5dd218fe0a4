"""Which indices of a dim a rank holds, as runs of the whole in the order of its local tensor."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from autopar.ir.layout import Layout, Shard
from autopar.ir.mesh import Mesh

Run = tuple[int, int]  # first index, length


def runs_of(layout: Layout, dim: int, length: int, mesh: Mesh, at: Mapping[str, int]) -> tuple[Run, ...]:
    """The runs of ``dim``, of ``length`` elements in all, that the rank at ``at`` holds."""
    shards = tuple((s, at[a], mesh.size(a)) for a, s in layout.shards(dim) if mesh.size(a) > 1)
    return _runs(length, shards) if shards else ((0, length),)


@lru_cache(maxsize=4096)
def _runs(length: int, shards: tuple[tuple[Shard, int, int], ...]) -> tuple[Run, ...]:
    """Runs of the indices whose digits every shard's coordinate holds; a local tensor keeps the order of the whole."""
    held = np.ones(length, dtype=bool)
    for shard, coordinate, ways in shards:
        offset = 0
        for p in shard.pieces:
            digit = np.arange(p.length) // p.inner % p.count
            mine = np.zeros(p.length, dtype=bool)
            for first, many in p.runs(coordinate, ways):
                mine |= (digit >= first) & (digit < first + many)
            held[offset : offset + p.length] &= mine
            offset += p.length
    edges = np.flatnonzero(np.diff(np.concatenate(([False], held, [False])).astype(np.int8)))
    return tuple((int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2]))
