"""Pass ``expert-parallel``: experts, and the rows of the batch, over the ``ep`` axis."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import R, Shard, Type, owner_shard, plain_shard
from autopar.ir.program import Form, Program
from autopar.passes.base import Context, Pass
from autopar.passes.data_parallel import DataParallel, batch_dim
from autopar.rules.arguments import with_arguments
from autopar.rules.relation import Assignment, Labels, Relation
from autopar.solve.annotate import clash, layouts, write
from autopar.solve.candidates import relations_of, spread
from autopar.solve.fallback import report_opaque
from autopar.solve.flow import Flow, flow_of
from autopar.solve.problem import Choices, solve
from autopar.solve.sources import batch_shard, product_weights, sources
from autopar.trace.places import UNSEEN

AXIS = "ep"
MUST = 1e5  # µs: gathering experts that are shared out, or all tokens instead of sending each to its experts


@dataclass(frozen=True)
class ExpertParallel(Pass):
    """Experts over ``ep``, which also carries rows of the batch.

    Does:
        Finds the stacked parameters of experts: those of ``experts`` ops, and those whose first factor meets an op that
        chooses along it (a router's topk, one-hot, scatter), however the model writes its dispatch. Shards them on
        that factor, everything else on the batch factor.
    Requires:
        ANNOTATED by data-parallel.
    Ensures:
        ANNOTATED on ep: stacked parameters of experts are S, the others R, the loss is P.
    Communication:
        An ``experts`` op: tokens · k · hidden elements to their experts and as many back, (N-1)/N of them on the wire
        where routing is balanced, the same in the backward. Dense dispatch: what its products need, by the rules.
    Limits:
        The number of experts divides over ep. With ``capacity`` a rank sends each expert that many times the mean of
        the choices of the rank with the most tokens, padded with zeros; choices beyond are dropped, by rank and in the
        order of tokens. None drops nothing. With ``chunks`` rows travel in as many parts, while others are computed.
    Sources:
        Lepikhin et al., GShard, arXiv:2006.16668; Gale et al., MegaBlocks, arXiv:2211.15841 (no token is dropped).
    """

    capacity: float | None = None
    chunks: int | None = None

    name: ClassVar[str] = "expert-parallel"
    requires: ClassVar[Form] = Form.ANNOTATED
    produces: ClassVar[Form] = Form.ANNOTATED

    def __post_init__(self) -> None:
        if self.capacity is not None and not self.capacity > 0:
            raise AutoparError("bad-strategy", f"expert_capacity is {self.capacity}", "a positive number, or None")
        if self.chunks is not None and self.chunks < 1:
            raise AutoparError("bad-strategy", f"expert_chunks is {self.chunks}", "at least 1, or None")

    def idle(self, program: Program) -> bool:
        """See Pass."""
        return program.mesh.size(AXIS) == 1

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        if self.idle(program):
            return program
        flow = flow_of(program)
        relations = relations_of(flow)
        owned = dict(_owned(program, flow, relations))
        given = {n: v for n, v in (("capacity", self.capacity), ("chunks", self.chunks)) if v is not None}
        for node, _ in flow.ops:
            if node.target is ops.experts and given:
                with_arguments(node, **given)
        _check_experts(program, context, flow, owned)
        shard = batch_shard(program.mesh, AXIS, program.rows)
        seeds = [(v, replace(shard, dim=d)) for v in sources(flow) if (d := batch_dim(program, flow, v)) is not None]
        seeds += owned.items()
        found = spread(flow, relations, seeds, lambda v, s: not clash(s, layouts(flow.values[v].key[0])[_at(flow, v)]))
        choices = DataParallel().choices(program, context, flow, found, AXIS, shard)
        solution = solve(flow, _with_experts(flow, choices, owned, _more(flow, found.shards, owned)))
        context.warnings += report_opaque(flow, found, solution, AXIS, strict=context.strict)
        write(program, flow, AXIS, solution)
        return program


def _at(flow: Flow, v: int) -> int:
    return flow.values[v].key[1]


def _with_experts(flow: Flow, choices: Choices, owned: dict[int, Shard], more: dict[int, Shard]) -> Choices:
    """The space of a data axis in which experts are shared out, and ``more`` parameters may be."""
    types: dict[int, list[Type]] = {**choices.types, **{v: [s] for v, s in owned.items()}}
    types |= {v: [R, s] for v, s in more.items()}

    def convert_price(v: int, src: Type, dst: Type) -> float:
        gathered = flow.values[v].role == "param" and isinstance(src, Shard)
        return choices.convert_price(v, src, dst) + (MUST if gathered else 0.0)

    def op_price(node: fx.Node, a: Assignment) -> float:
        gathers = node.target is ops.experts and isinstance(a.inputs[3], Shard) and not isinstance(a.inputs[0], Shard)
        return choices.op_price(node, a) + (MUST if gathers else 0.0)

    return replace(choices, types=types, op_price=op_price, convert_price=convert_price)


def _more(flow: Flow, shards: dict[int, dict[Shard, None]], owned: dict[int, Shard]) -> dict[int, Shard]:
    """Other parameters with the experts' factor in front, such as biases of a dense dispatch."""
    out: dict[int, Shard] = {}
    for v in sources(flow):
        value = flow.values[v]
        if value.role == "param" and value.diff and v not in owned:
            for shard in (s for s in shards.get(v, ()) if s.dim == 0 and s in owned.values()):
                out.setdefault(v, shard)
    return out


def _owned(program: Program, flow: Flow, relations: dict[fx.Node, Relation]) -> Iterator[tuple[int, Shard]]:
    """Stacked parameters of experts, with the shard of their first dim. Raises AutoparError ``indivisible-dim``."""
    ways = program.mesh.size(AXIS)
    found = {v: None for n, _ in flow.ops if n.target is ops.experts for v in flow.inputs(n)[3:]}
    dense = [
        v for v in sorted(product_weights(flow).parameters) if len(flow.values[v].spec.shape) > 2 and v not in found
    ]
    found |= {v: None for v in dense if _is_chosen(flow, relations, v)}
    for v in found:
        value = flow.values[v]
        node, count = value.key[0], value.spec.shape[0]
        if node.target is ops.stacked:
            _check_divides(flow.values[flow.inputs(node)[0]].param or node.name, count, ways)
            for e, p in enumerate(flow.inputs(node)):
                yield p, owner_shard(flow.values[p].spec.shape[0], e * ways // count, ways)
        elif value.role == "param":
            _check_divides(f"{value.param}: dim 0", count, ways)
            shard = plain_shard(0, count, ways)
            assert shard is not None
            yield v, shard


def _check_divides(what: str, count: int, ways: int) -> None:
    if count % ways:
        sizes = [n for n in range(1, count + 1) if count % n == 0]
        raise AutoparError(
            "indivisible-dim",
            f"{what} ({count} experts) does not divide over ep={ways}",
            f"ep in {', '.join(map(str, sizes))}; or use dp or tp for the other ranks",
        )


def _is_chosen(flow: Flow, relations: dict[fx.Node, Relation], v: int) -> bool:
    """Whether the first factor of a parameter meets an op that runs along it, as a choice of experts does."""
    count = flow.values[v].spec.shape[0]
    seed = plain_shard(0, count, count) if count > 1 else None
    if seed is None:
        return False
    found = spread(flow, relations, [(v, seed)])
    for node, _ in flow.ops:
        relation = relations[node]
        if isinstance(relation, Labels):
            ports = zip(found.ports(flow, node), (*relation.inputs, *relation.outputs), strict=True)
            if any(dims[s.dim] in relation.blocked | relation.internal for shards, dims in ports for s in shards):
                return True
    return False


def _check_experts(program: Program, context: Context, flow: Flow, owned: dict[int, Shard]) -> None:
    """A mesh with ep wants a model with experts; a program that reads no parameter has nothing to share out."""
    reads = any(flow.values[g.value].role == "param" and flow.values[g.value].diff for g in flow.groups)
    held = any(isinstance(layout.get(AXIS), Shard) for layout in context.pinned.values())
    if reads and not owned and not held:
        size = program.mesh.size(AXIS)
        what = f"mesh {program.mesh}: the model has no experts that could be shared out over ep={size}"
        raise AutoparError(
            "no-experts",
            "; ".join([what, *(note for note in program.notes if note.startswith(UNSEEN))]),
            "use dp for the rows of the batch; or say what its experts are with autopar.register_experts",
        )
