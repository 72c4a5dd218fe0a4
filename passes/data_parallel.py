"""Pass ``data-parallel``: the batch over the axes that carry data."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx, ops

from autopar.errors import AutoparError
from autopar.ir.layout import I, Layout, P, R, Shard, Type
from autopar.ir.mesh import TIME, Mesh
from autopar.ir.program import Form, Output, Program, tensor_args
from autopar.passes.base import Context, Pass
from autopar.rules.arguments import arguments
from autopar.rules.relation import Assignment, Opaque
from autopar.rules.strategies import strategies, talks
from autopar.rules.table import relation
from autopar.solve.annotate import clash, clashes, layouts, shares, write
from autopar.solve.candidates import Candidates, relations_of, spread
from autopar.solve.fallback import report_opaque
from autopar.solve.flow import Flow, flow_of, is_op
from autopar.solve.prices import conversion_prices, op_prices
from autopar.solve.problem import Choices, Solution, conversions, solve
from autopar.solve.sources import batch_shard, sources

IMPOSSIBLE = 1e6  # µs: a conversion between microbatches, or what all of them would have to compute
PLACED = (ops.aten.select.int, ops.aten.slice.Tensor, ops.aten.gather.default, ops.aten.embedding.default)
WHOLE = 1e3  # µs: an op that could keep its rows but is computed on all of them


@dataclass(frozen=True)
class DataParallel(Pass):
    """Rows of the batch over ``dp``.

    Does:
        Types every value on each data axis but ``ep``, which the pass expert-parallel types. Inputs with a batch dim
        are S on it, parameters are R, the loss is P: a term of the sum that is the loss of the global batch.
    Requires:
        TRACED, with the rows of each data rank.
    Ensures:
        ANNOTATED on the data axes; no conversion of a parameter there: the engine alone reduces gradients.
    Communication:
        Gradients, by the engine: all_reduce 2Ψ(N-1)/N bytes per rank and step. In the program only what couples rows
        (batch statistics, token counts).
    Limits:
        Rows may be uneven on one data axis, not on two at once.
    Sources:
        Li et al., PyTorch Distributed (VLDB 2020); losses are summed, not averaged.
    """

    name: ClassVar[str] = "data-parallel"
    requires: ClassVar[Form] = Form.TRACED
    produces: ClassVar[Form] = Form.ANNOTATED

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        axes = [a for a in (*program.mesh.data_axes, TIME) if program.mesh.size(a) > 1]
        if len(axes) > 1 and len(set(program.rows)) > 1:
            raise AutoparError(
                "uneven-rows", f"rows per data rank are {program.rows}, uneven over {' and '.join(axes)}",
                "give every data rank as many rows, or use one data axis",
            )  # fmt: skip
        check_microbatches(program)
        if axes and program.rows and sum(program.rows) < 2:
            raise AutoparError(
                "few-rows", f"{sum(program.rows)} rows in all for {program.mesh.data_size} data ranks",
                "give the global batch at least two rows",
            )  # fmt: skip
        start(program)
        flow = flow_of(program)
        relations = relations_of(flow)
        for axis in (a for a in axes if program.mesh.base(a) != "ep"):
            shard = batch_shard(program.mesh, axis, program.rows)
            batched = {v: batch_dim(program, flow, v) for v in sources(flow)}
            seeds = [(v, replace(shard, dim=d)) for v, d in batched.items() if d is not None]
            found = spread(flow, relations, seeds, lambda v, s: not clash(s, _layout(flow, v)))
            solution = solve(flow, self.choices(program, context, flow, found, axis, shard))
            if axis == TIME:
                _check_in_time(flow, solution)
            context.warnings += report_opaque(flow, found, solution, axis, strict=context.strict)
            write(program, flow, axis, solution)
        program.form = Form.ANNOTATED
        return program

    def choices(
        self, program: Program, context: Context, flow: Flow, found: Candidates, axis: str, shard: Shard
    ) -> Choices:
        """The space of one data axis: the batch factor only."""
        options = {}
        for node, _ in flow.ops:
            rel = found.relations[node]
            every = (a for a in strategies(node, found.ports(flow, node), rel) if not clashes(node, a))
            options[node] = [a for a in every if axis != TIME or not (talks(rel, a) or _placed(node, a))]
        left = shares(flow, _sizes(program.mesh))
        prices = op_prices(flow, context.hardware, program.mesh, axis, left)

        def op_price(node: fx.Node, a: Assignment) -> float:
            sharded = any(isinstance(t, Shard) for t in (*a.inputs, *a.outputs))
            can = len(options[node]) > 2 and any(
                isinstance(t, Shard) for o in options[node] for t in (*o.inputs, *o.outputs)
            )
            known = axis != TIME or not node.meta.get("diff")  # else each microbatch would do the work of all
            return prices(node, a) + ((WHOLE if known else IMPOSSIBLE) if can and not sharded else 0.0)

        return Choices(
            types={v: self._types(program, flow, found, v, axis, shard) for v in sources(flow)},
            strategies=options,
            outputs=[self._output(out, shard) for out in program.outputs],
            op_price=op_price,
            source_price=lambda value, kind: 0.0,
            convert_price=(lambda v, src, dst: _in_time(flow.values[v].diff, src, dst))
            if axis == TIME
            else conversion_prices(flow, context.hardware, program.mesh, axis, left),
        )

    def _types(self, program: Program, flow: Flow, found: Candidates, v: int, axis: str, shard: Shard) -> list[Type]:
        value = flow.values[v]
        if value.role == "param":
            return [R] if value.diff else [I]
        if value.role == "input":
            dim = batch_dim(program, flow, v)
            whole: Type = R if axis == TIME and value.diff else I
            return [whole] if dim is None else [replace(shard, dim=dim)]
        return [*found.shards.get(v, ()), I, *([R] if value.diff else []), *([P] if value.spec.shape == () else [])]

    def _output(self, out: Output, shard: Shard) -> list[Type]:
        if out.kind == "loss":
            return [P]
        return [I] if out.batch_dim is None else [replace(shard, dim=out.batch_dim)]


def batch_dim(program: Program, flow: Flow, v: int) -> int | None:
    """The batch dim of an input; None for other values."""
    value = flow.values[v]
    return program.inputs[value.key[0].meta["input"]].batch_dim if value.role == "input" else None


def check_microbatches(program: Program) -> None:
    """Every data rank's rows divide into the microbatches. Raises AutoparError ``microbatch-rows``."""
    count = program.mesh.microbatches
    if count > 1 and program.rows and (len(set(program.rows)) > 1 or program.rows[0] % count):
        rows = program.rows[0] if len(set(program.rows)) == 1 else program.rows
        sizes = [n for n in range(1, min(program.rows) + 1) if all(r % n == 0 for r in program.rows)]
        raise AutoparError(
            "microbatch-rows", f"{rows} rows of a data rank do not divide into {count} microbatches",
            f"microbatches in {', '.join(map(str, sizes))}, with as many rows on every data rank",
        )  # fmt: skip


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {**dict(mesh.axes), TIME: mesh.microbatches}


def _placed(node: fx.Node, a: Assignment) -> bool:
    """Whether what an op does to its share depends on which one it is: microbatches all run one program."""
    if any(isinstance(t, Shard) and not t.even for t in (*a.inputs, *a.outputs)):
        return True
    if node.target not in PLACED or not isinstance(a.inputs[0], Shard):
        return False
    dim = arguments(node).get("dim", 0)  # of an embedding's table, its rows
    return a.inputs[0].dim == dim % len(tensor_args(node)[0].meta["spec"].shape)


def _in_time(diff: bool, src: Type, dst: Type) -> float:
    """Steps cannot exchange values or gradients: only slices and kept-once terms are possible along ``mb``."""
    backward = diff and ((src == I and (dst == R or isinstance(dst, Shard))) or (src == R and dst == I))
    return IMPOSSIBLE if isinstance(src, Shard) or src == P or backward else 0.0


def _check_in_time(flow: Flow, solution: Solution) -> None:
    for v, src, dst in conversions(flow, solution):
        if _in_time(flow.values[v].diff, src, dst):
            raise coupled(flow, v)


def coupled(flow: Flow, value: int) -> AutoparError:
    """``batch-coupled-loss``: a value takes, or its gradient goes to, several microbatches."""
    node = flow.values[value].key[0]
    where = node.meta.get("module") or node.name
    line = f" ({node.meta['source']})" if node.meta.get("source") else ""
    reads = [r.node for g in flow.groups if g.value == value for r in g.reads if r.kind == "op"]
    unknown = [n for n in (node, *reads) if is_op(n) and isinstance(relation(n), Opaque)]
    if unknown:
        what = f"{where}{line}: {unknown[0].target} has no sharding rule, so a step cannot be split in microbatches"
        return AutoparError("batch-coupled-loss", what, "use microbatches=1, or write it with ops that have a rule")
    readers = dict.fromkeys(str(n.meta.get("module") or n.name) for n in reads) or {"the output": None}
    others = [r for r in readers if r != where]
    read = f"what it gives to {', '.join(others)}" if others else "a value of it"
    return AutoparError(
        "batch-coupled-loss",
        f"{where}{line}: {read} couples rows of different microbatches (as statistics of the batch do) and is not "
        "known from inputs alone",
        "use microbatches=1",
    )


def _layout(flow: Flow, v: int) -> Layout:
    node, index = flow.values[v].key
    return layouts(node)[index]


def start(program: Program) -> None:
    """Every value gets an empty layout, every reader empty requirements: no axis is decided yet."""
    empty = Layout()
    for name, param in program.params.items():
        program.params[name] = param.with_layout(empty)
    for _, graph in program.graphs():
        for node in graph.nodes:
            if node.op == "output":
                if graph is program.graph:
                    node.meta["requires"] = (empty,) * len(program.outputs)
                continue
            spec = node.meta.get("spec")
            node.meta["layout"] = (empty,) * len(spec) if isinstance(spec, tuple) else empty
            if is_op(node):
                node.meta["requires"] = (empty,) * len(tensor_args(node))
            elif node.op == "call_module":
                node.meta["requires"] = (empty,) * len(node.args)
