"""The order of a dim in zigzag: chunks as they lie in the whole, or as ranks hold them one after another.

Rank c of N holds the chunks c and 2N-1-c. These are moves of local memory; collectives see plain runs.
"""

import torch
from torch import Tensor


def by_rank(x: Tensor, dim: int, outer: int, chunks: tuple[int, ...], inner: int) -> Tensor:
    """From the order of the whole to that of ranks.

    Args:
        dim: of ``outer`` * sum(``chunks``) * ``inner`` elements.
        chunks: size of each of the 2N chunks, in the order of the whole.
    """
    return _reordered(x, dim, outer, chunks, inner, _ranks(len(chunks)))


def as_whole(x: Tensor, dim: int, outer: int, chunks: tuple[int, ...], inner: int) -> Tensor:
    """From the order of ranks to that of the whole; arguments as in ``by_rank``."""
    held = _ranks(len(chunks))
    back = [held.index(c) for c in range(len(chunks))]
    return _reordered(x, dim, outer, tuple(chunks[c] for c in held), inner, back)


def _ranks(many: int) -> list[int]:
    return [c for r in range(many // 2) for c in (r, many - 1 - r)]


def _reordered(x: Tensor, dim: int, outer: int, chunks: tuple[int, ...], inner: int, order: list[int]) -> Tensor:
    parts = x.unflatten(dim, (outer, sum(chunks), inner)).split(list(chunks), dim + 1)
    return torch.cat([parts[c] for c in order], dim + 1).flatten(dim, dim + 2)
