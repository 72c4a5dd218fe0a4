"""How the dims of an op's tensors are related: what sharding one of them means for the others.

A relation has ports: the op's tensor inputs (``tensor_args`` order), then its outputs. ``transfer(port, shard)``
gives the type of every port when that port is sharded so, or None where the op cannot be computed shard by shard.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from autopar.ir.layout import I, P, Piece, R, Shard, Type

Dims = tuple[str | None, ...]


@dataclass(frozen=True)
class Assignment:
    """A type for each input and each output of an op, on one axis."""

    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]


class Relation(Protocol):
    """What a rule gives for a node."""

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """Types of all ports if ``port`` is sharded so; None where that cannot be."""
        ...

    def partials(self) -> Iterator[Assignment]:
        """The ways in which the op passes terms of a sum through."""
        ...


@dataclass(frozen=True)
class Labels:
    """An einsum-like relation: dims with the same label are the same factor.

    Args:
        inputs, outputs: a label for each dim; None for a broadcast dim of size 1.
        blocked: labels that the op cannot be sharded on.
        added: inputs that are added to the result rather than multiplied into it; they become P when a label is
        contracted.
        linear: sets of inputs in which the op is linear jointly: all of a set P and the rest whole gives P.
        internal: labels over which the op communicates by itself; outputs without them are then whole and invariant.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    blocked: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    internal: frozenset[str] = frozenset()

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        label = (*self.inputs, *self.outputs)[port][shard.dim]
        if label is None or label in self.blocked or any(d.count(label) > 1 for d in (*self.inputs, *self.outputs)):
            return None
        contracted = not any(label in d for d in self.outputs)
        inside = label in self.internal

        def of_input(at: int, dims: Dims) -> Type:
            if label in dims:
                return Shard(dims.index(label), shard.pieces)
            return P if contracted and at in self.added else R

        def of_output(dims: Dims) -> Type:
            if label in dims:
                return Shard(dims.index(label), shard.pieces)
            return I if inside else (P if contracted else R)

        return Assignment(
            tuple(of_input(i, d) for i, d in enumerate(self.inputs)), tuple(of_output(d) for d in self.outputs)
        )

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        for together in self.linear:
            if self.added <= together and all(i < len(self.inputs) for i in together):
                yield Assignment(
                    tuple(P if i in together else R for i in range(len(self.inputs))), tuple(P for _ in self.outputs)
                )


@dataclass(frozen=True)
class Reshape:
    """A view between two shapes: only brackets move, so a factor keeps its stride within its group of dims."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    linear: bool = True

    def groups(self) -> list[tuple[list[int], list[int]]]:
        """Runs of dims of both shapes with equal products, as short as possible."""
        out: list[tuple[list[int], list[int]]] = []
        i = j = 0
        while i < len(self.source) or j < len(self.target):
            left, right = [], []
            a = b = 1
            if i < len(self.source):
                a, left, i = self.source[i], [i], i + 1
            if j < len(self.target):
                b, right, j = self.target[j], [j], j + 1
            while a != b:
                if a < b and i < len(self.source):
                    left.append(i)
                    a, i = a * self.source[i], i + 1
                elif b < a and j < len(self.target):
                    right.append(j)
                    b, j = b * self.target[j], j + 1
                else:
                    return []
            out.append((left, right))
        return out

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        here, there = (self.source, self.target) if port == 0 else (self.target, self.source)
        for left, right in self.groups():
            mine, theirs = (left, right) if port == 0 else (right, left)
            if shard.dim in mine:
                other = self._move(shard, here, there, mine, theirs)
                if other is None:
                    return None
                return Assignment((shard,), (other,)) if port == 0 else Assignment((other,), (shard,))
        return None

    def _move(
        self, shard: Shard, here: tuple[int, ...], there: tuple[int, ...], mine: list[int], theirs: list[int]
    ) -> Shard | None:
        after = prod(here[d] for d in mine if d > shard.dim)
        if len(shard.pieces) > 1:
            if any(here[d] > 1 for d in mine if d < shard.dim):
                return None
            return _move_segments(shard, after, there, theirs)
        p = shard.pieces[0]
        stride = p.inner * after
        for d in theirs:
            minor = prod(there[e] for e in theirs if e > d)
            if there[d] > 1 and stride % minor == 0 and (minor * there[d]) % (stride * p.count) == 0:
                return Shard(d, (p.over(there[d], stride // minor),))
        return None

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        if self.linear:
            yield Assignment((P,), (P,))


@dataclass(frozen=True)
class Cut:
    """A slice ``start`` to ``end`` of one dim: every run of a shard loses what lies outside, and every rank keeps some.

    The other dims pass; so does a sum.
    """

    start: int
    end: int
    dim: int
    others: Labels

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        if shard.dim != self.dim:
            return self.others.transfer(port, shard)
        p = shard.pieces[0]
        if port or len(shard.pieces) > 1 or p.outer > 1:
            return None
        at, left = 0, list[int]()
        for n in p.chunks:
            left.append(max(0, min(at + n * p.inner, self.end) - max(at, self.start)))
            at += n * p.inner
        ways = len(left) // 2 if p.zigzag else len(left)
        if not all(left[c] + (left[-1 - c] if p.zigzag else 0) for c in range(ways)):
            return None
        length = self.end - self.start
        even = len(set(left)) == 1
        made = Piece(length, length, 1, tuple(left), p.zigzag)
        if even:
            made = Piece(length, len(left), left[0], zigzag=p.zigzag)
        return Assignment((shard,), (Shard(self.dim, (made,)),))

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        return self.others.partials()


def _move_segments(shard: Shard, after: int, there: tuple[int, ...], theirs: list[int]) -> Shard | None:
    """A dim of several segments becomes (or comes from) the first dim of the group that is not 1."""
    d = next((d for d in theirs if there[d] > 1), None)
    if d is None:
        return None
    minor = prod(there[e] for e in theirs if e > d)
    pieces = []
    for p in shard.pieces:
        if (p.length * after) % minor or (p.inner * after) % minor:
            return None
        pieces.append(p.over(p.length * after // minor, p.inner * after // minor))
    return Shard(d, tuple(pieces))


@dataclass(frozen=True)
class Segments:
    """One whole dim against its consecutive parts: ``split`` (whole in, parts out) and ``cat`` (parts in, whole out).

    ``lengths`` are the parts' sizes along ``dim``; the other dims are the same factors in all.
    """

    lengths: tuple[int, ...]
    dim: int
    whole_first: bool
    rank: int
    batch: Labels = field(init=False)

    def __post_init__(self) -> None:
        dims: Dims = tuple("cut" if d == self.dim else f"d{d}" for d in range(self.rank))
        many = (dims,) * len(self.lengths)
        inputs, outputs = ((dims,), many) if self.whole_first else (many, (dims,))
        together = frozenset(range(len(inputs)))
        object.__setattr__(self, "batch", Labels(inputs, outputs, frozenset({"cut"}), linear=(together,)))

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        if shard.dim != self.dim:
            return self.batch.transfer(port, shard)
        part = port - 1 if self.whole_first else port
        from_whole = port == 0 if self.whole_first else port == len(self.lengths)
        parts = self._cut(shard.pieces) if from_whole else self._like(part, shard.pieces)
        if parts is None:
            return None
        whole = (Shard(self.dim, join(p for ps in parts for p in ps)),)
        pieces = tuple(Shard(self.dim, p) for p in parts)
        return Assignment(whole, pieces) if self.whole_first else Assignment(pieces, whole)

    def _cut(self, pieces: tuple[Piece, ...]) -> list[tuple[Piece, ...]] | None:
        """The pieces of the whole, cut at the parts' boundaries."""
        out: list[tuple[Piece, ...]] = []
        rest = list(pieces)
        for length in self.lengths:
            mine: list[Piece] = []
            while length:
                if not rest:
                    return None
                p = rest.pop(0)
                take = min(length, p.length)
                if take % (p.count * p.inner):
                    return None
                mine.append(p.over(take, p.inner))
                if take < p.length:
                    rest.insert(0, p.over(p.length - take, p.inner))
                length -= take
            out.append(join(mine))
        return out

    def _like(self, part: int, pieces: tuple[Piece, ...]) -> list[tuple[Piece, ...]] | None:
        """Every part sharded as ``part`` is, in proportion to its length."""
        if len(pieces) > 1 or self.lengths[part] == 0:
            return None
        p, out = pieces[0], list[tuple[Piece, ...]]()
        for length in self.lengths:
            if (p.inner * length) % p.length:
                return None
            inner = p.inner * length // p.length
            if inner == 0:
                return None
            out.append((p.over(length, inner),))
        return out

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        return self.batch.partials()


def join(pieces: Iterator[Piece] | list[Piece]) -> tuple[Piece, ...]:
    """Neighbouring pieces with the same factor become one, so that equal shards compare equal."""
    out: list[Piece] = []
    for p in pieces:
        if out and out[-1].over(0, p.inner) == p.over(0, p.inner) and out[-1].inner == p.inner:
            p = p.over(out.pop().length + p.length, p.inner)
        out.append(p)
    return tuple(out)


@dataclass(frozen=True)
class Grouped:
    """Channels that are ``groups`` independent groups: a shard of them takes whole groups, everywhere the same ones.

    ``labels`` name the dims of channels "c" (taken) and "o" (made), and say how every other dim is related. ``sizes``:
    how many channels there are by label.
    """

    labels: Labels
    groups: int
    sizes: dict[str, int]

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        name = (*self.labels.inputs, *self.labels.outputs)[port][shard.dim]
        if name not in self.sizes:
            return self.labels.transfer(port, shard)
        wide = self.sizes[name] // self.groups
        if any(p.length % wide or p.inner % wide for p in shard.pieces):
            return None
        groups = [p.over(p.length // wide, p.inner // wide) for p in shard.pieces]

        def of(dims: Dims) -> Type:
            own = next((n for n in dims if n in self.sizes), None)
            if own is None:
                return R
            each = self.sizes[own] // self.groups
            return Shard(dims.index(own), tuple(p.over(p.length * each, p.inner * each) for p in groups))

        return Assignment(tuple(map(of, self.labels.inputs)), tuple(map(of, self.labels.outputs)))

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        return self.labels.partials()


@dataclass(frozen=True)
class Opaque:
    """An op without a rule: computed whole."""

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        return None

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        return iter(())
