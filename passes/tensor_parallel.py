"""Pass ``tensor-parallel``: weights, heads, vocabulary and (with ``sequence``) positions over the ``tp`` axis."""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import ClassVar

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.layout import I, P, Piece, R, Shard, Type, overlap
from autopar.ir.mesh import TIME, Mesh
from autopar.ir.program import Form, Program, tensor_args
from autopar.passes.base import Context, Pass
from autopar.passes.data_parallel import batch_dim
from autopar.rules.relation import Assignment, Relation
from autopar.rules.strategies import strategies
from autopar.solve.annotate import clash, clashes, layouts, shares, write
from autopar.solve.candidates import Candidates, relations_of, spread
from autopar.solve.fallback import report_opaque
from autopar.solve.flow import Flow, flow_of
from autopar.solve.prices import conversion_prices, op_prices
from autopar.solve.problem import Choices, solve
from autopar.solve.residual import residual_stream
from autopar.solve.sequence import positions
from autopar.solve.sources import (
    Weights,
    grouped,
    product_parameters,
    product_weights,
    repeated_parameters,
    repeats,
    sequence_seeds,
    sources,
    weight_seeds,
)  # fmt: skip

MUST = 1e5  # µs: a weight that could be sharded but is held, or gathered, whole
POSITIONS = 1e3  # µs: with ``sequence``, an op that could shard its positions but does not
PER_MIB = 1.0  # µs: holding a MiB of parameter


@dataclass(frozen=True)
class TensorParallel(Pass):
    """Weights of matrix products over ``tp``; the rest follows at the least cost.

    Does:
        Splits ``tp`` into sub-axes where groups of key heads are fewer than ranks. Types every value on tp by the
        integer
        program: column and row products, heads, vocabulary-parallel embedding, head and cross-entropy. With
        ``sequence`` the positions of norms, residuals and dropouts too.
    Requires:
        ANNOTATED by data-parallel.
    Ensures:
        ANNOTATED on tp; every weight of a product that can be sharded is; outputs whole on every rank.
    Communication:
        A layer of column and row products: 2 all_reduce forward and 2 backward of the hidden state, 2b(N-1)/N bytes
        per rank each; with ``sequence`` the same bytes as all_gather and reduce_scatter.
    Limits:
        Attention heads divide over tp; key heads divide tp or are divided by it.
    Sources:
        Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198).
    """

    sequence: bool = False

    name: ClassVar[str] = "tensor-parallel"
    requires: ClassVar[Form] = Form.ANNOTATED
    produces: ClassVar[Form] = Form.ANNOTATED

    def idle(self, program: Program) -> bool:
        """See Pass."""
        return program.mesh.size("tp") == 1

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        if self.idle(program):
            return program
        flow = flow_of(program)
        program.mesh = sub_axes(program.mesh, flow) if context.mesh is None else _as_before(program.mesh, context.mesh)
        relations = relations_of(flow)
        weights = product_weights(flow)
        exempt: set[int] = set()
        shared = 1
        stream = residual_stream(flow)
        claimed = {} if self.sequence else positions(flow, relations, program.mesh)
        for axis in program.mesh.parts("tp"):
            shared *= program.mesh.size(axis)
            few = [n for n, h, g in (*grouped(flow), *repeats(flow)) if g < h and g % shared]
            exempt = repeated_parameters(flow, few)
            seeds = list(weight_seeds(flow, weights.parameters, program.mesh, axis))
            if self.sequence:
                seeds += sequence_seeds(flow, batch_dims(program, flow, relations), program.mesh, axis)
            batch = batch_dims(program, flow, relations)

            def allowed(v: int, s: Shard, batch: dict[int, set[int]] = batch) -> bool:
                node, index = flow.values[v].key
                if v in stream and s.dim == len(flow.values[v].spec.shape) - 1:
                    return False
                if any(overlap(s, other) for other in claimed.get(v, ())):
                    return False
                return s.dim not in batch.get(v, ()) and not clash(s, layouts(node)[index])

            found = spread(flow, relations, seeds, allowed)
            _check_heads(program, flow, found, axis)
            space = _Space(program, context, flow, found, axis, self.sequence, weights, exempt, allowed)
            solution = solve(flow, space.choices())
            context.warnings += report_opaque(flow, found, solution, axis, strict=context.strict)
            write(program, flow, axis, solution)
        late = {v for v in product_parameters(flow) if flow.values[v].param in context.unread}
        context.warnings += _held_whole(
            program, flow, weights.parameters - exempt - late, "no dim can be shared out of"
        )
        context.warnings += _held_whole(program, flow, late, "the first call did not use")
        return program


def _as_before(mesh: Mesh, pinned: Mesh) -> Mesh:
    """The mesh with the sub-axes that parameters are already laid out on."""
    return replace(mesh, axes=pinned.axes)


def sub_axes(mesh: Mesh, flow: Flow) -> Mesh:
    """``tp`` split in two where keys have fewer groups of heads than ranks: over the groups, and over their repeats."""
    ways = mesh.size("tp")
    counts = [g for _, h, g in (*grouped(flow), *repeats(flow)) if g < h and h % ways == 0]
    major = ways
    for g in counts:
        major = gcd(major, g)
    return mesh if major in (1, ways) or len(mesh.parts("tp")) > 1 else mesh.split("tp", major)


def batch_dims(program: Program, flow: Flow, relations: dict[fx.Node, Relation]) -> dict[int, set[int]]:
    """The dims of each value that hold nothing but rows of the batch, whatever the data axes' sizes are."""
    total = sum(program.rows)
    if total < 2:
        return {}
    dims = {v: batch_dim(program, flow, v) for v in sources(flow)}
    seeds = [(v, Shard(d, (Piece(total, total, 1),))) for v, d in dims.items() if d is not None]
    found = spread(flow, relations, seeds)
    return {
        v: {s.dim for s in shards if s.pieces[0].count * s.pieces[0].inner == s.length and s.pieces[0].inner == 1}
        for v, shards in found.shards.items()
    }


def _held_whole(program: Program, flow: Flow, weights: Set[int], why: str) -> list[str]:
    """A message naming the weights of products that every rank of tp holds whole."""
    parts = program.mesh.parts("tp")
    whole = []
    for v in sorted(weights):
        name = flow.values[v].param
        layout = program.params[name].layout
        held = program.params[name].kind == "parameter" and prod(flow.values[v].spec.shape) > 1
        if held and layout is not None and not any(isinstance(layout.get(a), Shard) for a in parts):
            whole.append(f"{name} {list(flow.values[v].spec.shape)}")
    if not whole or program.mesh.size("tp") == 1:
        return []
    return [f"tp={program.mesh.size('tp')}: {why} {', '.join(whole)}; every rank holds them whole"]


def _check_heads(program: Program, flow: Flow, found: Candidates, axis: str) -> None:
    """Attention whose heads cannot be shared out is refused, with the sizes that work."""
    ways = program.mesh.size("tp")
    for node, heads, groups in grouped(flow):
        fits = heads % ways == 0 and (
            groups % ways == 0 or ways % groups == 0 or groups == heads or _covers(heads, groups, ways)
        )
        if not fits:
            sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
            what = f"{heads} heads" if groups == heads else f"{heads} query heads and {groups} key heads"
            raise AutoparError(
                "indivisible-dim",
                f"{node.meta.get('module') or 'attention'}: {what} do not divide over tp={ways}",
                f"tp in {', '.join(map(str, sizes))}; or use dp for the other ranks",
            )


def _covers(heads: int, groups: int, ways: int) -> bool:
    """Whether splitting tp over groups and repeats shares the heads out."""
    major = gcd(groups, ways)
    return (heads // groups) % (ways // major) == 0


@dataclass
class _Space:
    """The choices on one (sub-)axis of tp."""

    program: Program
    context: Context
    flow: Flow
    found: Candidates
    axis: str
    sequence: bool
    weights: Weights
    exempt: set[int]
    allowed: Callable[[int, Shard], bool]

    def choices(self) -> Choices:
        flow, mesh = self.flow, self.program.mesh
        options = {
            n: [a for a in strategies(n, self.found.ports(flow, n), self.found.relations[n]) if self._may(n, a)]
            for n, _ in flow.ops
        }
        left = shares(flow, {**dict(mesh.axes), TIME: mesh.microbatches})
        prices = op_prices(flow, self.context.hardware, mesh, self.axis, left)
        convert = conversion_prices(flow, self.context.hardware, mesh, self.axis, left)

        def op_price(node: fx.Node, a: Assignment) -> float:
            return prices(node, a) + (POSITIONS if self.sequence and self._idle(node, a, options[node]) else 0.0)

        def convert_price(v: int, src: Type, dst: Type) -> float:
            gathered = isinstance(src, Shard) and v in self.weights.parameters | self.weights.computed
            return convert(v, src, dst) + (MUST if gathered else 0.0)

        return Choices(
            types={v: self._types(v) for v in sources(flow)},
            strategies=options,
            outputs=[[I] for _ in self.program.outputs],
            op_price=op_price,
            source_price=self._hold,
            convert_price=convert_price,
        )

    def _may(self, node: fx.Node, a: Assignment) -> bool:
        """Whether the axis may cut so what the op makes; an input that is whole may be cut for one op alone."""
        made = zip(self.flow.outputs(node), a.outputs)
        kept = all(self.allowed(v, t) for v, t in made if v is not None and isinstance(t, Shard))
        return kept and not clashes(node, a)

    def _idle(self, node: fx.Node, a: Assignment, options: list[Assignment]) -> bool:
        """Whether an op that has no weight of its own could shard positions or features but stays whole."""
        sharded = [any(isinstance(t, Shard) for t in (*o.inputs, *o.outputs)) for o in options]
        own = any(self.flow.of(x) in self.weights.parameters for x in tensor_args(node))
        return any(sharded) and not sharded[options.index(a)] and bool(node.meta.get("diff")) and not own

    def _types(self, v: int) -> list[Type]:
        value = self.flow.values[v]
        candidates = list(self.found.shards.get(v, ()))
        if value.role == "input":
            return [I]
        if value.role == "param":
            pinned = self._pinned(v)
            if pinned is not None:
                return [pinned]
            held = self.program.params[value.param].kind == "parameter"
            return [I, *(s for s in candidates if _storable(s))] if held else [I]
        return [*candidates, I, *([R] if value.diff else []), *([P] if value.spec.shape == () else [])]

    def _pinned(self, v: int) -> Type | None:
        layout = self.context.pinned.get(self.flow.values[v].param)
        return layout[self.axis] if layout is not None else None

    def _hold(self, v: int, kind: Type) -> float:
        value = self.flow.values[v]
        if value.role != "param" or not value.diff:
            return 0.0
        mib = value.spec.bytes / 2**20 * PER_MIB
        if isinstance(kind, Shard):
            return mib / self.program.mesh.size(self.axis)
        can = (
            v in self.weights.parameters
            and v not in self.exempt
            and any(_storable(s) for s in self.found.shards.get(v, ()))
        )
        return mib + (MUST if can else 0.0)


def _storable(shard: Shard) -> bool:
    """Whether a parameter can be held so: uneven only in contiguous runs of single rows."""
    return shard.even or (shard.plain and shard.pieces[0].inner == 1)
