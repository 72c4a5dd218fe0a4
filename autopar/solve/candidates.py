"""Shards worth considering for each value on one axis: seeds, carried through the rules until nothing is new."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.layout import Shard
from autopar.rules.relation import Relation
from autopar.rules.table import relation
from autopar.solve.flow import Flow

LIMIT = 12  # shards kept for a value; the first found are the plainest


@dataclass
class Candidates:
    """Shards by value, and the relation of every op."""

    shards: dict[int, dict[Shard, None]] = field(default_factory=lambda: defaultdict(dict))
    relations: dict[fx.Node, Relation] = field(default_factory=dict)

    def ports(self, flow: Flow, node: fx.Node) -> list[list[Shard]]:
        """Candidate shards of every port of an op."""
        values = [*flow.inputs(node), *flow.outputs(node)]
        return [list(self.shards.get(v, ())) if v is not None else [] for v in values]


def relations_of(flow: Flow) -> dict[fx.Node, Relation]:
    """The relation of every op of the program."""
    return {node: relation(node) for node, _ in flow.ops}


def spread(
    flow: Flow,
    relations: dict[fx.Node, Relation],
    seeds: Iterable[tuple[int, Shard]],
    allowed: Callable[[int, Shard], bool] = lambda value, shard: True,
) -> Candidates:
    """Carry the seeds through every op's relation and across block boundaries."""
    found = Candidates(relations=relations)
    touching: dict[int, list[tuple[fx.Node, int]]] = defaultdict(list)
    for node, _ in flow.ops:
        for port, v in enumerate([*flow.inputs(node), *flow.outputs(node)]):
            if v is not None:
                touching[v].append((node, port))
    linked: dict[int, set[int]] = defaultdict(set)
    for group in flow.groups:
        for a in group.arguments:
            linked[group.value].add(a)
            linked[a].add(group.value)
    queue: deque[tuple[int, Shard]] = deque()

    def offer(value: int | None, kind: object) -> None:
        if value is None or not isinstance(kind, Shard):
            return
        mine = found.shards[value]
        if kind not in mine and len(mine) < LIMIT and allowed(value, kind):
            mine[kind] = None
            queue.append((value, kind))

    for value, shard in seeds:
        offer(value, shard)
    while queue:
        value, shard = queue.popleft()
        for other in sorted(linked[value]):
            offer(other, shard)
        for node, port in touching[value]:
            made = relations[node].transfer(port, shard)
            if made is not None:
                for v, kind in zip(
                    [*flow.inputs(node), *flow.outputs(node)], (*made.inputs, *made.outputs), strict=True
                ):
                    offer(v, kind)
    return found
