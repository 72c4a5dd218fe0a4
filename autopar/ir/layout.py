"""What a value is on each mesh axis: invariant, replicated, partial, or sharded on a factor of a dim.

A factor of a dim is a digit of its index: index = (outer * count + factor) * inner + rest. Sharding the factor
over an axis gives each coordinate a contiguous share of ``count``. A plain shard has outer 1; the batch factor of a
flattened ``B*S`` has inner S; an interleaved or fused projection has outer > 1, or one piece per segment. In zigzag
order a coordinate holds two runs, the c-th of 2N chunks from the front and the c-th from the back: under a causal mask
they cost as much on every rank. A local tensor keeps the order of the whole in any case.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class Piece:
    """A segment of a sharded dim, and the factor of it that is shared out.

    Args:
        length: global elements of the segment.
        count: global size of the sharded factor. Canonical where even: the axis size.
        inner: elements of one index of the factor (everything minor to it), global.
        sizes: share of ``count`` for each coordinate (in zigzag order: each of the 2N chunks) where it is uneven, else
            None.
        zigzag: whether the coordinate c of N holds the chunks c and 2N-1-c.
    """

    length: int
    count: int
    inner: int
    sizes: tuple[int, ...] | None = None
    zigzag: bool = False

    @property
    def outer(self) -> int:
        """Repeats of the factor in the segment."""
        return self.length // (self.count * self.inner)

    @property
    def chunks(self) -> tuple[int, ...]:
        """How many of ``count`` each run has, in order: one for each coordinate, or two in zigzag order."""
        return self.sizes or (1,) * self.count

    def runs(self, coordinate: int, ways: int) -> tuple[tuple[int, int], ...]:
        """(first index of the factor, how many) of each run that the coordinate holds, in order."""
        many = 2 * ways if self.zigzag else ways
        chunks = self.sizes or (self.count // many,) * many
        mine = (coordinate, 2 * ways - 1 - coordinate) if self.zigzag else (coordinate,)
        return tuple((sum(chunks[:c]), chunks[c]) for c in mine)

    def share(self, coordinate: int, ways: int) -> int:
        """How many of ``count`` the coordinate holds."""
        return sum(n for _, n in self.runs(coordinate, ways))

    def start(self, coordinate: int, ways: int) -> int:
        """The first index of the factor that the coordinate holds."""
        return self.runs(coordinate, ways)[0][0]

    def over(self, length: int, inner: int) -> "Piece":
        """The same factor of another dim: with this length, and this many elements of one index."""
        return replace(self, length=length, inner=inner)


def piece(length: int, count: int, inner: int, ways: int, sizes: tuple[int, ...] | None = None) -> Piece:
    """A canonical piece: an even factor is reduced to one index a coordinate, so that equal shards compare equal."""
    if sizes is not None and len(set(sizes)) == 1:
        sizes = None
    if sizes is None:
        assert count % ways == 0, (length, count, inner, ways)
        return Piece(length, ways, inner * (count // ways))
    return Piece(length, count, inner, sizes)


def chunk_sizes(count: int, ways: int) -> tuple[int, ...]:
    """Shares of ``count`` as ``torch.chunk`` and DTensor cut them: ceil first, the last ones smaller."""
    step = -(-count // ways)
    return tuple(max(0, min(step, count - step * c)) for c in range(ways))


@dataclass(frozen=True)
class Invariant:
    """The same whole value on every rank, and the same whole gradient."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True)
class Replicated:
    """The same whole value on every rank; the gradient is a partial sum."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """A term of the sum; the gradient is whole on every rank."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Shard:
    """A share of one factor of dim ``dim`` (one piece for each segment of the dim)."""

    dim: int
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Global size of the dim."""
        return sum(p.length for p in self.pieces)

    @property
    def even(self) -> bool:
        """Whether every coordinate holds as much."""
        return all(p.sizes is None for p in self.pieces)

    @property
    def plain(self) -> bool:
        """Whether each coordinate holds one contiguous run, in order."""
        return len(self.pieces) == 1 and self.pieces[0].outer == 1 and not self.zigzag

    @property
    def zigzag(self) -> bool:
        """Whether each coordinate holds a chunk from the front and one from the back."""
        return any(p.zigzag for p in self.pieces)

    @property
    def owner(self) -> int | None:
        """The coordinate that holds everything, where one does; None for a dim that is shared out."""
        whole = len(self.pieces) == 1 and self.pieces[0].count == 1 and self.pieces[0].sizes is not None
        return self.pieces[0].sizes.index(1) if whole and self.pieces[0].sizes else None

    def __str__(self) -> str:
        if self.owner is not None:
            return f"S({self.dim}: all on {self.owner})"
        if self.plain:
            return f"S({self.dim})"
        pieces = (f"{p.outer}x{p.count}x{p.inner}{'z' if p.zigzag else ''}" for p in self.pieces)
        return f"S({self.dim}:{'|'.join(pieces)})"


Type = Invariant | Replicated | Partial | Shard
I, R, P = Invariant(), Replicated(), Partial()


def plain_shard(dim: int, length: int, ways: int) -> Shard | None:
    """Shard dim ``dim`` of ``length`` elements in contiguous runs; None if a rank would be empty.

    Uneven runs are those of ``torch.chunk``, or of ``torch.tensor_split`` where ``chunk`` would leave a rank empty.
    """
    if length < ways:
        return None
    sizes = chunk_sizes(length, ways)
    if min(sizes) == 0:
        sizes = tuple(length // ways + (c < length % ways) for c in range(ways))
    return Shard(dim, (piece(length, length, 1, ways, sizes),))


def owner_shard(length: int, coordinate: int, ways: int) -> Shard:
    """Dim 0 of ``length`` elements, all of them on one coordinate, nothing on the others."""
    return Shard(0, (Piece(length, 1, length, tuple(int(c == coordinate) for c in range(ways))),))


def zigzag_shard(dim: int, length: int, ways: int) -> Shard | None:
    """Shard dim ``dim`` in 2N chunks, the first and the last to coordinate 0, and so on; None if one would be empty."""
    many = 2 * ways
    if length < many:
        return None
    if length % many == 0:
        return Shard(dim, (Piece(length, many, length // many, zigzag=True),))
    sizes = tuple(length // many + (c < length % many) for c in range(many))
    return Shard(dim, (Piece(length, length, 1, sizes, zigzag=True),))


@dataclass(frozen=True)
class Layout:
    """A value's type on each axis of the mesh, as (axis, type) pairs in mesh order."""

    types: tuple[tuple[str, Type], ...] = ()

    def __hash__(self) -> int:
        """That of the types, kept: layouts are looked up far more often than made."""
        try:
            return self._hash  # type: ignore[attr-defined]
        except AttributeError:
            known = self.__dict__["_hash"] = hash(self.types)
            return known

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process has another of."""
        return {"types": self.types}

    @staticmethod
    def of(types: Mapping[str, Type]) -> "Layout":
        """From a mapping of axis to type."""
        return Layout(tuple(types.items()))

    def __getitem__(self, axis: str) -> Type:
        return dict(self.types)[axis]

    def get(self, axis: str, default: Type = I) -> Type:
        """The type on ``axis``, or ``default`` where the mesh lacks it."""
        for a, t in self.types:
            if a == axis:
                return t
        return default

    def having(self, axis: str, kind: Type) -> "Layout":
        """This layout with another type on ``axis``, its place kept; the same object for equal ones."""
        return _having(self, axis, kind)

    def shards(self, dim: int | None = None) -> Iterable[tuple[str, Shard]]:
        """(axis, shard) of every axis that shards the value, or that shards ``dim``."""
        return ((a, t) for a, t in self.types if isinstance(t, Shard) and dim in (None, t.dim))

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes over which the value is a term of a sum."""
        return tuple(a for a, t in self.types if t == P)


@lru_cache(maxsize=4096)
def _having(layout: Layout, axis: str, kind: Type) -> Layout:
    if axis in dict(layout.types):
        return Layout(tuple((a, kind if a == axis else t) for a, t in layout.types))
    return Layout((*layout.types, (axis, kind)))


def _share(piece_: Piece, at: int, ways: int, of: int) -> int:
    """``of`` global elements of the factor's span, as held by the coordinate."""
    return of // piece_.count * piece_.share(at, ways)


def local_pieces(layout: Layout, dim: int, length: int, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, ...]:
    """Local length of each segment of ``dim`` at coordinates ``at``."""
    shards = list(layout.shards(dim))
    if not shards:
        return (length,)
    most = max((s for _, s in shards), key=lambda s: len(s.pieces))
    out = []
    for k, segment in enumerate(most.pieces):
        n = segment.length
        for axis, shard in shards:
            n = _share(shard.pieces[k if len(shard.pieces) > 1 else 0], at[axis], mesh.size(axis), n)
        out.append(n)
    return tuple(out)


def local_shape(shape: Iterable[int], layout: Layout, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the piece of a global ``shape`` that the rank at coordinates ``at`` holds."""
    return tuple(sum(local_pieces(layout, d, n, mesh, at)) for d, n in enumerate(shape))


def local_inner(layout: Layout, axis: str, index: int, mesh: Mesh, at: Mapping[str, int]) -> int:
    """Local elements minor to the factor that ``axis`` shards in segment ``index``: its inner over the minor axes."""
    shard = layout[axis]
    assert isinstance(shard, Shard)
    mine = shard.pieces[index]
    inner = mine.inner
    for other, theirs in layout.shards(shard.dim):
        p = theirs.pieces[index if len(theirs.pieces) > 1 else 0]
        if other != axis and p.inner * p.count <= mine.inner:
            inner = _share(p, at[other], mesh.size(other), inner)
    return inner


def overlap(a: Shard, b: Shard) -> bool:
    """Whether two axes' shards of one dim want the same digit of the index."""
    if a.dim != b.dim:
        return False
    few, many = sorted((a.pieces, b.pieces), key=len)
    if len(few) == 1:  # its digit must lie within every segment
        few = tuple(few[0].over(p.length, few[0].inner) for p in many)
    if [p.length for p in few] != [p.length for p in many]:
        return True
    return any(x.length % (x.count * x.inner) or _same_digit(x, y) for x, y in zip(few, many))


def _same_digit(x: Piece, y: Piece) -> bool:
    minor, major = (x, y) if (x.inner, x.count) < (y.inner, y.count) else (y, x)
    return bool(major.inner % (minor.inner * minor.count))


def format_dims(shape: Iterable[int], layout: Layout) -> str:
    """``[4, 16@dp, 32@tp]+tp``: dims with the axes that shard them, then the axes over which the value is partial."""
    dims = []
    for d, n in enumerate(shape):
        marks = "".join(f"@{a}" + ("" if s.plain else "'") for a, s in layout.shards(d))
        dims.append(f"{n}{marks}")
    return f"[{', '.join(dims)}]" + "".join(f"+{a}" for a in layout.partial)
