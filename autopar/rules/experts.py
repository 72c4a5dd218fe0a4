"""The relation of a layer of experts: rows, experts, and the factors inside one expert, read off its body."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.ir import edit, grouped
from autopar.ir.grouped import Body
from autopar.ir.layout import Layout, P, Piece, R, Shard, Type, owner_shard, plain_shard
from autopar.ir.program import Spec, tensor_args
from autopar.rules.arguments import arguments
from autopar.rules.builders import Builder, rule
from autopar.rules.relation import Assignment, Relation

STAND_INS: dict[Any, Builder] = {
    grouped.linear: rule("t i, !e o i -> t o", {0}, {1}),
    grouped.matmul: rule("t i, !e i o -> t o", {0}, {1}),
    grouped.each: rule("!e o -> t o", {0}),
}


@dataclass(frozen=True)
class Inside:
    """A body as a graph: its rows, its stacked parameters, its ops and its result."""

    x: fx.Node
    params: tuple[fx.Node, ...]
    ops: tuple[fx.Node, ...]
    result: fx.Node


@lru_cache(maxsize=256)
def inside(body: Body, x: Spec, params: tuple[Spec, ...]) -> Inside:
    """The graph of a body for rows like ``x`` and stacked parameters like ``params``; not to be changed."""
    return graph_of(body, x, params)


def graph_of(body: Body, x: Spec, params: tuple[Spec, ...]) -> Inside:
    """The same, made anew."""
    graph = fx.Graph()
    values: list[fx.Node] = []
    for i, held in enumerate((x, *params)):
        values.append(graph.placeholder(f"v{i}"))
        values[-1].meta["spec"] = held
    for name, args, kwargs in body:
        given = [grouped.resolve(a, values) for a in args]
        if name == "each":
            given.append(x.shape[0])
        named = {k: grouped.resolve(v, values) for k, v in kwargs}
        target: Any = grouped.target_of(name)
        spec = given[0].meta["spec"][given[1]] if name == "getitem" else None
        values.append(edit.call(graph, target, given, named, spec=spec))
    count = len(params) + 1
    return Inside(values[0], tuple(values[1:count]), tuple(values[count:]), values[-1])


def keeps_rows(body: Body, x: Spec, params: tuple[Spec, ...]) -> bool:
    """Whether each row of the result depends on the same row of ``x`` alone."""
    graph = inside(body, x, params)
    rows = Shard(0, (Piece(x.shape[0], x.shape[0], 1),))
    found = settle(graph, graph.x, rows)
    return found is not None and found.get(graph.result) == rows


def settle(graph: Inside, start: fx.Node, kind: Type) -> dict[fx.Node, Type] | None:
    """Types of the body's values that follow from one of them; those not named are whole. None where nothing fits."""
    known: dict[fx.Node, Type] = {start: kind}
    relations = {n: _relation(n) for n in graph.ops if n.target is not grouped.target_of("getitem")}
    changed = True
    while changed:
        changed = False
        for node in graph.ops:
            if node not in relations:
                continue
            ports = [*tensor_args(node), *results_of(node)]
            made = _fitting(relations[node], len(tensor_args(node)), [known.get(p) for p in ports])
            if made is None:
                if any(known.get(p, R) != R for p in ports):
                    return None
                continue
            for port, type_ in zip(ports, (*made.inputs, *made.outputs), strict=True):
                if type_ != R and port not in known:
                    known[port] = type_
                    changed = True
    return known


def _relation(node: fx.Node) -> Relation:
    """The relation of an op inside a body."""
    from autopar.rules.table import relation  # which has a line for the op that holds this body

    return STAND_INS[node.target](node) if node.target in STAND_INS else relation(node)


def results_of(node: fx.Node) -> list[fx.Node]:
    """What stands for each result of an op: itself, or its ``getitem`` nodes in order."""
    if not isinstance(node.meta["spec"], tuple):
        return [node]
    parts = {u.args[1]: u for u in node.users}
    return [parts.get(i, node) for i in range(len(node.meta["spec"]))]


def _fitting(relation: Relation, inputs: int, known: list[Type | None]) -> Assignment | None:
    """The assignment of an op that agrees with what is known of its ports; None where nothing but whole is."""
    port = next((i for i, t in enumerate(known) if isinstance(t, Shard)), None)
    if port is not None:
        kind = known[port]
        assert isinstance(kind, Shard)
        options: Iterator[Assignment | None] = iter((relation.transfer(port, kind),))
    elif P in known:
        options = relation.partials()
    else:
        return None
    for a in options:
        if a is not None and all(t in (None, k) for t, k in zip(known, (*a.inputs, *a.outputs), strict=True)):
            return a
    return None


@dataclass(frozen=True)
class Experts:
    """hidden [T, H], index [T, k], weights [T, k], stacked parameters [E, ...] -> [T, O].

    Rows may be sharded (parameters whole), or the experts (rows whole: each rank adds what its experts contribute, P),
    or a factor inside each expert, or rows and experts by one axis (rows then travel to their experts and back).
    """

    graph: Inside
    params: int

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        out = 3 + self.params
        if port in (0, 1, 2, out) and shard.dim == 0:
            return Assignment((shard, shard, shard, *(R,) * self.params), (shard,))
        if 3 <= port < out and shard.dim == 0:
            return Assignment((R, R, R, *(shard,) * self.params), (P,)) if shard.even and shard.plain else None
        if port in (1, 2):
            return None
        return self._features(port, shard)

    def _features(self, port: int, shard: Shard) -> Assignment | None:
        values = [self.graph.x, None, None, *self.graph.params, self.graph.result]
        start = values[port]
        assert start is not None
        found = settle(self.graph, start, shard)
        if found is None:
            return None
        x, out = found.get(self.graph.x, R), found.get(self.graph.result, R)
        if out == R or x == P or (isinstance(out, Shard) and out.dim == 0):
            return None
        return Assignment((x, R, R, *(found.get(p, R) for p in self.graph.params)), (out,))

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        yield Assignment((R, R, P, *(R,) * self.params), (P,))

    def exchanges(self, ports: Sequence[Sequence[Shard]]) -> Iterator[Assignment]:
        """Rows and experts sharded by one axis, for every pair of candidates."""
        owned = {s: None for port in ports[3 : 3 + self.params] for s in port if s.dim == 0 and s.even and s.plain}
        for rows in (s for s in ports[0] if s.dim == 0):
            for experts in owned:
                yield Assignment((rows, rows, rows, *(experts,) * self.params), (rows,))


@dataclass(frozen=True)
class Stacked:
    """E parameters of experts -> [E, ...]: whole experts belong to ranks, or a factor inside each is shared out."""

    shapes: tuple[tuple[int, ...], ...]

    def transfer(self, port: int, shard: Shard) -> Assignment | None:
        """See Relation."""
        count, out = len(self.shapes), port == len(self.shapes)
        ways = len(shard.pieces[0].sizes or ()) if shard.owner is not None else shard.pieces[0].count
        if (out and shard.dim == 0) or (not out and shard.owner is not None):
            whole = plain_shard(0, count, ways)
            if count % ways or not all(self.shapes) or (out and shard != whole):
                return None
            inputs = tuple(owner_shard(s[0], e * ways // count, ways) for e, s in enumerate(self.shapes))
            fits = out or inputs[port] == shard
            return Assignment(inputs, (whole,)) if fits and whole is not None else None
        dim = shard.dim - out
        return Assignment((replace(shard, dim=dim),) * count, (replace(shard, dim=dim + 1),))

    def partials(self) -> Iterator[Assignment]:
        """See Relation."""
        return iter(())


def stacked(node: fx.Node) -> Stacked:
    """The relation of an ``ops.stacked`` node."""
    return Stacked(tuple(a.meta["spec"].shape for a in tensor_args(node)))


def layouts_inside(graph: Inside, ports: Sequence[Layout]) -> dict[fx.Node, Layout]:
    """The layout of each of a body's values on the axes that shard a factor inside an expert.

    Args:
        ports: layouts of the tensor inputs of the ``experts`` node, then of its result.
    """
    values = [graph.x, None, None, *graph.params, graph.result]
    found: dict[fx.Node, Layout] = {n: Layout() for n in (graph.x, *graph.params, *graph.ops)}
    for axis in dict.fromkeys(a for layout in ports for a, _ in layout.types):
        kinds = ((v, layout.get(axis)) for v, layout in zip(values, ports, strict=True))
        seed = next(((v, t) for v, t in kinds if v is not None and isinstance(t, Shard) and t.dim > 0), None)
        types = settle(graph, *seed) if seed is not None else None
        for node, kind in (types or {}).items():
            found[node] = found[node].having(axis, kind)
    return found


def exchange_axis(node: fx.Node) -> str | None:
    """The axis that shares out both the rows and the experts of an ``ops.experts`` node; None where there is none."""
    rows, owned = (arguments(node)[n] for n in ("hidden", "params"))
    over = {a for a, _ in rows.meta.get("layout", Layout()).shards(0)}
    return next((a for a, _ in owned[0].meta.get("layout", Layout()).shards(0) if a in over), None)


def experts(node: fx.Node) -> Experts:
    """The relation of an ``ops.experts`` node."""
    known = arguments(node)
    params = tuple(p.meta["spec"] for p in known["params"])
    graph = inside(known["body"], known["hidden"].meta["spec"], params)
    return Experts(graph, len(params))
