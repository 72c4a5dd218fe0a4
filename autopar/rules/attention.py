"""The relation of attention: batch, heads (grouped or not) and, without a causal mask, query positions.

Ring attention also takes queries and keys sharded on positions, and no part of them otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.ir.layout import P, Piece, R, Shard, Type, plain_shard, zigzag_shard
from autopar.rules.arguments import arguments, shape_of
from autopar.rules.relation import Assignment, Dims, Labels


@dataclass(frozen=True)
class Attention:
    """q [.., H, S, D], k [.., G, T, D], v [.., G, T, E], masks and numbers if any -> [.., H, S, E].

    A shard of the query heads takes whole groups of heads (then k and v are sharded alike) or lies within a group (then
    k and v are whole). All but the head dims are ``labels``.
    """

    labels: Labels
    heads: int
    groups: int
    head_dim: int
    value_linear: bool

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        dims = (*self.labels.inputs, *self.labels.outputs)[port]
        name = dims[shard.dim]
        if name not in ("h", "g"):
            return self.labels.transfer(port, shard)
        query = self._queries(shard) if name == "g" else shard.pieces[0]
        if query is None or len(shard.pieces) > 1:
            return None
        inputs = tuple(self._type(d, query) for d in self.labels.inputs)
        outputs = tuple(self._type(d, query) for d in self.labels.outputs)
        ok = all(t is not None for t in (*inputs, *outputs))
        return Assignment(tuple(t for t in inputs if t), tuple(t for t in outputs if t)) if ok else None

    def _queries(self, shard: Shard) -> Piece | None:
        p, repeats = shard.pieces[0], self.heads // self.groups
        return p.over(self.heads, p.inner * repeats) if len(shard.pieces) == 1 else None

    def _type(self, dims: Dims, query: Piece) -> Type | None:
        repeats = self.heads // self.groups
        if "h" in dims:
            return Shard(dims.index("h"), (query,))
        if "g" not in dims:
            return R
        if query.inner % repeats == 0:
            return Shard(dims.index("g"), (query.over(self.groups, query.inner // repeats),))
        return R if repeats % (query.inner * query.count) == 0 and query.sizes is None else None

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        if self.value_linear:
            yield Assignment(tuple(P if i == 2 else R for i in range(len(self.labels.inputs))), (P,))


@dataclass(frozen=True)
class Ring(Attention):
    """Attention whose queries and keys are both sharded on positions; masks and numbers keep every key.

    ``lengths``: of queries and of keys. Where they differ keys are cut in the same order as queries.
    """

    lengths: tuple[int, int]

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        dims = (*self.labels.inputs, *self.labels.outputs)[port]
        name = dims[shard.dim]
        if name not in ("s", "t"):
            return super().transfer(port, shard)
        if (3 <= port < len(self.labels.inputs) and name == "t") or len(shard.pieces) > 1 or shard.pieces[0].outer > 1:
            return None
        pieces = {name: shard.pieces[0], ("t" if name == "s" else "s"): self._other(name, shard.pieces[0])}
        if None in pieces.values():
            return None

        def of(at: int, dims: Dims) -> Type:
            mine = "t" if at in (1, 2) else "s"
            found = pieces[mine]
            assert found is not None
            return Shard(dims.index(mine), (found,)) if mine in dims else R

        ins = tuple(of(i, d) for i, d in enumerate(self.labels.inputs))
        return Assignment(ins, (of(len(ins), self.labels.outputs[0]),))

    def _other(self, name: str, mine: Piece) -> Piece | None:
        here, there = self.lengths if name == "s" else self.lengths[::-1]
        if here == there:
            return mine
        ways = (len(mine.sizes) if mine.sizes else mine.count) // (2 if mine.zigzag else 1)
        other = (zigzag_shard if mine.zigzag else plain_shard)(0, there, ways)
        return other.pieces[0] if other else None


def ring_attention(node: fx.Node) -> Ring:
    """The relation of an ``ops.ring_attention`` node."""
    base, known = attention(node), arguments(node)
    lengths = (shape_of(known["q"])[-2], shape_of(known["k"])[-2])
    return Ring(base.labels, base.heads, base.groups, base.head_dim, base.value_linear, lengths)


def attention(node: fx.Node) -> Attention:
    """The relation of an ``ops.attention`` node."""
    known = arguments(node)
    q, k = shape_of(known["q"]), shape_of(known["k"])
    rank = len(q)
    lead: list[str | None] = [f"b{i}" for i in range(rank - 3)]

    def batch(shape: tuple[int, ...]) -> list[str | None]:
        return [name if n != 1 else None for name, n in zip(lead, shape)]

    heads = q[-3] if rank > 2 else 1
    groups = k[-3] if rank > 2 else 1
    head: list[str | None] = ["h"] if rank > 2 else []
    group: list[str | None] = (
        ([None] if groups == 1 and heads > 1 else ["h" if groups == heads else "g"]) if rank > 2 else []
    )
    v = shape_of(known["v"])
    ins: list[Dims] = [(*batch(q), *head, "s", "d"), (*batch(k), *group, "t", "d"), (*batch(v), *group, "t", "e")]
    full = (*lead, *head, "s", "t")
    for name in ("mask", "bias", "sink"):
        if known[name] is not None:
            m = shape_of(known[name])
            ins.append(tuple(n if size != 1 else None for n, size in zip(full[rank - len(m) :], m)))
    for name, place in (("query_ids", "s"), ("key_ids", "t")):
        if known[name] is not None:
            ins.append((lead[0] if shape_of(known[name])[0] != 1 else None, place))
    by_place = known["is_causal"] or known["band"] is not None
    blocked = {"t", "d", "e"} | ({"s"} if by_place else set())
    if heads % max(groups, 1):
        blocked |= {"h", "g"}
    labels = Labels(tuple(ins), ((*lead, *head, "s", "e"),), frozenset(blocked))
    return Attention(labels, heads, groups, rank - 3, not known["dropout"])
