"""What a type says that each coordinate holds, by enumerating elements rather than by the code under test."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autopar.ir.layout import Layout, P, Piece, Shard, Type, piece, plain_shard, zigzag_shard
from autopar.ir.mesh import Mesh


def holds(shard: Shard, coordinate: int, ways: int) -> list[int]:
    """Global indices of the dim that the coordinate holds."""
    out, at = [], 0
    for p in shard.pieces:
        many = 2 * ways if p.zigzag else ways
        owners = [min(c, many - 1 - c) if p.zigzag else c for c in range(many)]
        sizes = p.sizes or (p.count // many,) * many
        digits = [owner for owner, n in zip(owners, sizes, strict=True) for _ in range(n)]
        for e in range(p.length):
            if digits[e // p.inner % p.count] == coordinate:
                out.append(at + e)
        at += p.length
    return out


def owned(layout: Layout, dim: int, length: int, mesh: Mesh, at: Mapping[str, int]) -> list[int]:
    """Global indices of ``dim`` that the rank at coordinates ``at`` holds."""
    found = set(range(length))
    for axis, shard in layout.shards(dim):
        found &= set(holds(shard, at[axis], mesh.size(axis)))
    return sorted(found)


def terms(x: Tensor, ways: int, generator: torch.Generator) -> list[Tensor]:
    """Random tensors whose sum is ``x``; for bools, disjoint ones."""
    if x.dtype == torch.bool:
        owner = torch.randint(ways, x.shape, generator=generator)
        return [x & (owner == c) for c in range(ways)]
    if not x.is_floating_point() and not x.is_complex():
        parts = [torch.randint(-3, 4, x.shape, generator=generator, dtype=x.dtype) for _ in range(ways - 1)]
    else:
        parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(ways - 1)]
    return [*parts, x - sum(parts)]


def cut(x: Tensor, kind: Type, ways: int, generator: torch.Generator) -> list[Tensor]:
    """What each coordinate holds of ``x``."""
    if isinstance(kind, Shard):
        return [
            x.index_select(kind.dim, torch.tensor(holds(kind, c, ways), dtype=torch.int64)).contiguous()
            for c in range(ways)
        ]
    return [t.contiguous() for t in (terms(x, ways, generator) if kind == P else [x] * ways)]


def whole(parts: Sequence[Tensor], kind: Type, shape: Sequence[int]) -> Tensor:
    """The value that the coordinates' tensors stand for; asserts that they agree where they must."""
    if isinstance(kind, Shard):
        out = torch.zeros(tuple(shape), dtype=parts[0].dtype)
        for c, part in enumerate(parts):
            index = torch.tensor(holds(kind, c, len(parts)), dtype=torch.int64)
            assert part.shape[kind.dim] == len(index), (kind, c, part.shape)
            out.index_copy_(kind.dim, index, part)
        return out
    if kind == P:
        return torch.stack(list(parts)).any(0) if parts[0].dtype == torch.bool else sum(parts[1:], parts[0])
    for part in parts:
        torch.testing.assert_close(part, parts[0], rtol=1e-12, atol=1e-12, equal_nan=True)
    return parts[0]


def shards(dim: int, n: int, ways: int) -> Iterator[Shard]:
    """A family of shards of a dim: plain, uneven, interleaved, a factor in the middle, several segments."""
    plain = plain_shard(dim, n, ways)
    if plain is not None:
        yield plain
    zigzag = zigzag_shard(dim, n, ways)
    if zigzag is not None:
        yield zigzag
        if n % (4 * ways) == 0:
            yield Shard(dim, (Piece(n, 2 * ways, n // (4 * ways), zigzag=True),))
    if n > ways:
        yield Shard(dim, (piece(n, n, 1, ways, (n - ways + 1,) + (1,) * (ways - 1)),))
    for outer in (2, 3):
        if n % (outer * ways) == 0:
            yield Shard(dim, (Piece(n, ways, n // (outer * ways)),))
    for count in (ways + 1, ways + 2):
        if n % (2 * count) == 0:
            sizes = (1,) * (ways - 1) + (count - ways + 1,)
            yield Shard(dim, (Piece(n, count, n // (2 * count), sizes),))
            yield Shard(dim, (Piece(n, count, n // count, sizes),))
    if n >= 3 * ways and n % ways == 0:
        lengths = (ways, n - ways) if n != 2 * ways else (ways, ways)
        yield Shard(dim, tuple(piece(m, m, 1, ways) for m in lengths))
        yield Shard(dim, tuple(piece(m, m, 1, ways) for m in (ways, ways, n - 2 * ways)))
