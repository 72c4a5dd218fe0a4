"""The relation of attention: batch, heads (grouped or not) and, without a causal mask, query positions."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.ir.layout import P, Piece, R, Shard, Type
from autopar.rules.arguments import arguments, shape_of
from autopar.rules.relation import Assignment, Dims, Labels


@dataclass(frozen=True)
class Attention:
    """q [.., H, S, D], k [.., G, T, D], v [.., G, T, E], optional mask -> [.., H, S, E].

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
        return Piece(self.heads, p.count, p.inner * repeats, p.sizes) if len(shard.pieces) == 1 else None

    def _type(self, dims: Dims, query: Piece) -> Type | None:
        repeats = self.heads // self.groups
        if "h" in dims:
            return Shard(dims.index("h"), (query,))
        if "g" not in dims:
            return R
        if query.inner % repeats == 0:
            return Shard(dims.index("g"), (Piece(self.groups, query.count, query.inner // repeats, query.sizes),))
        return R if repeats % (query.inner * query.count) == 0 and query.sizes is None else None

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        if self.value_linear:
            yield Assignment(tuple(P if i == 2 else R for i in range(len(self.labels.inputs))), (P,))


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
    if known.get("mask") is not None:
        m = shape_of(known["mask"])
        full = (*lead, *head, "s", "t")
        ins.append(tuple(n if size != 1 else None for n, size in zip(full[rank - len(m) :], m)))
    blocked = {"t", "d", "e"} | ({"s"} if known["is_causal"] else set())
    if heads % max(groups, 1):
        blocked |= {"h", "g"}
    labels = Labels(tuple(ins), ((*lead, *head, "s", "e"),), frozenset(blocked))
    return Attention(labels, heads, groups, rank - 3, not known["dropout"])
