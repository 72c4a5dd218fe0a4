"""The strategies of a node on one axis: every assignment of types that its relation allows."""

from collections.abc import Iterable, Sequence

from torch import fx

from autopar.ir.layout import I, R, Shard, Type
from autopar.ir.program import Spec, specs, tensor_args
from autopar.rules.experts import Experts
from autopar.rules.relation import Assignment, Labels, Relation
from autopar.rules.table import relation


def diff_ports(node: fx.Node) -> tuple[list[bool], list[bool]]:
    """Whether a gradient may flow through each input and each output."""
    ins = [bool(a.meta.get("diff")) for a in tensor_args(node)]
    outs = [bool(node.meta.get("diff")) and isinstance(s, Spec) and s.is_float for s in specs(node)]
    return ins, outs


def canonical(kind: Type, diff: bool) -> Type:
    """R and I are one where no gradient flows: I."""
    return I if kind == R and not diff else kind


def whole(node: fx.Node) -> list[Assignment]:
    """Computed whole on every rank: all I, or all R where a gradient flows."""
    ins, outs = diff_ports(node)
    found = [Assignment((I,) * len(ins), (I,) * len(outs))]
    if any(ins):
        found.append(Assignment(tuple(canonical(R, d) for d in ins), tuple(canonical(R, d) for d in outs)))
    return found


def strategies(node: fx.Node, ports: Sequence[Iterable[Shard]], rel: Relation | None = None) -> list[Assignment]:
    """All assignments: whole, partial, and sharded as one of the candidate shards of a port (inputs, then outputs)."""
    rel = rel or relation(node)
    ins, outs = diff_ports(node)
    found = dict.fromkeys(whole(node))
    for a in rel.partials():
        found[_canonical(a, ins, outs)] = None
    for port, shards in enumerate(ports):
        for shard in shards:
            made = rel.transfer(port, shard)
            if made is not None:
                found[_canonical(made, ins, outs)] = None
    if isinstance(rel, Experts):
        for made in rel.exchanges([list(shards) for shards in ports]):
            found[_canonical(made, ins, outs)] = None
    return list(found)


def talks(rel: Relation, a: Assignment) -> bool:
    """Whether an op whose inputs are sharded so communicates by itself."""
    if not isinstance(rel, Labels):
        return False
    shards = ((dims, t) for dims, t in zip(rel.inputs, a.inputs, strict=True) if isinstance(t, Shard))
    return any(dims[t.dim] in rel.internal for dims, t in shards)


def _canonical(a: Assignment, ins: list[bool], outs: list[bool]) -> Assignment:
    return Assignment(
        tuple(canonical(t, d) for t, d in zip(a.inputs, ins, strict=True)),
        tuple(canonical(t, d) for t, d in zip(a.outputs, outs, strict=True)),
    )


def legal(node: fx.Node, inputs: Sequence[Type], outputs: Sequence[Type]) -> bool:
    """Whether the op, given inputs of these types on one axis, makes outputs of those types."""
    ins, outs = diff_ports(node)
    wanted = _canonical(Assignment(tuple(inputs), tuple(outputs)), ins, outs)
    ports = [[t] if isinstance(t, Shard) else [] for t in (*inputs, *outputs)]
    return wanted in strategies(node, ports)
