"""Pass ``context-parallel``: the sequence over the ``cp`` axis, attention by ring, by Ulysses, or by both."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import I, P, R, Shard, Type
from autopar.ir.mesh import TIME
from autopar.ir.program import Form, Program, tensor_args
from autopar.passes.base import Context, Pass
from autopar.passes.tensor_parallel import batch_dims
from autopar.rules.arguments import arguments, with_arguments
from autopar.rules.relation import Assignment
from autopar.rules.strategies import strategies
from autopar.solve.annotate import clash, clashes, layouts, shares, write
from autopar.solve.candidates import Candidates, relations_of, spread
from autopar.solve.fallback import report_opaque
from autopar.solve.flow import Flow, flow_of
from autopar.solve.heads import repeat_keys
from autopar.solve.prices import conversion_prices, op_prices
from autopar.solve.problem import Choices, solve
from autopar.solve.sequence import check_sequence, context_seeds, heads_shard
from autopar.solve.sources import of_parameters, sources

WHOLE = 1e5  # µs: an op on activations that could run on its part of the sequence but does not
RING, ULYSSES = "ring", "ulysses"
Parts = tuple[tuple[str, int], ...]  # kind and ranks of each sub-axis of cp, major to minor


@dataclass(frozen=True)
class ContextParallel(Pass):
    """Positions over ``cp``.

    Does:
        Types every value on cp by an integer program whose only shards are those of the sequence. Ring attention keeps
        queries and passes keys and values around; Ulysses shards heads instead while attention runs. Causal rings take
        the sequence in zigzag order, all else in contiguous runs. ``kind`` is ``ring``,
        ``ulysses``, ``ring:A+ulysses:B`` (cp is split, the ring is major), or ``auto``: the cheapest of them.
    Requires:
        ANNOTATED by data-parallel and tensor-parallel: Ulysses shares out the heads that tp leaves.
    Ensures:
        ANNOTATED on cp: parameters R, the loss P, inputs and other outputs whole; no activation is gathered along the
        sequence but for an output of the model.
    Communication:
        Bytes per rank and layer, b those of all keys (values as many), N ranks. Ring: 2b(N-1)/N forward; as much again
        backward and 2b(N-1)/N of gradients. Ulysses: four all-to-alls of b(N-1)/N² each way. Gradients by the engine.
    Limits:
        A ring drops no probabilities: attention dropout needs Ulysses. What mixes positions otherwise (a convolution or
        a recurrence along them, unrecognized attention) is refused. Lengths divide over 2AB runs where cp is split.
    Sources:
        Liu et al. 2023 (arXiv:2310.01889); Jacobs et al. 2023 (arXiv:2309.14509); Fang and Zhao 2024
        (arXiv:2405.07719); zigzag order: Zhu, ring-flash-attention.
    """

    kind: str = "auto"

    name: ClassVar[str] = "context-parallel"
    requires: ClassVar[Form] = Form.ANNOTATED
    produces: ClassVar[Form] = Form.ANNOTATED

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|ring|ulysses|ring:\d+\+ulysses:\d+", self.kind):
            why = f"context_parallel={self.kind!r} is none of ring, ulysses, ring:A+ulysses:B, auto"
            raise AutoparError("bad-strategy", why, "write ring, ulysses or, for cp=8, ring:2+ulysses:4")

    def idle(self, program: Program) -> bool:
        """See Pass."""
        return program.mesh.size("cp") == 1

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        if self.idle(program):
            return program
        best: tuple[float, Program, list[str]] | None = None
        first: AutoparError | None = None
        for parts in self._plans(program, context):
            try:
                made = _planned(program.clone(), replace(context, warnings=[]), parts, _zigzag(program, parts))
            except AutoparError as error:
                first = first or error
                continue
            if best is None or made[0] < best[0]:
                best = made
        if best is None:
            assert first is not None
            raise first
        context.warnings += best[2]
        return best[1]

    def _plans(self, program: Program, context: Context) -> Iterator[Parts]:
        """The ways to split cp, those that parameters are not laid out for left out."""
        ways = program.mesh.size("cp")
        if self.kind in (RING, ULYSSES):
            found: list[Parts] = [((self.kind, ways),)]
        elif self.kind == "auto":
            found = [((RING, ways),), ((ULYSSES, ways),)]
            found += [((RING, a), (ULYSSES, ways // a)) for a in range(2, ways) if ways % a == 0]
        else:
            a, b = map(int, re.findall(r"\d+", self.kind))
            if a * b != ways:
                why = f"context_parallel={self.kind}: {a} times {b} ranks, but cp={ways}"
                raise AutoparError("bad-strategy", why, f"make the product {ways}")
            found = [tuple(p for p in ((RING, a), (ULYSSES, b)) if p[1] > 1)]
        held = context.mesh
        sizes = None if held is None else [held.size(a) for a in held.parts("cp")]
        return (p for p in found if sizes is None or [n for _, n in p] == sizes)


def _zigzag(program: Program, parts: Parts) -> bool:
    """Whether the sequence is held in zigzag order: where a ring has a causal mask, whose work it shares out."""
    nodes = (node for _, graph in program.graphs() for node in graph.nodes)
    known = (arguments(node) for node in nodes if node.target is ops.attention)
    return parts[0][0] == RING and any(n["is_causal"] or n["band"] == (0, None) for n in known)


def _planned(program: Program, context: Context, parts: Parts, zigzag: bool) -> tuple[float, Program, list[str]]:
    """Price, program and messages of one split and order."""
    if len(parts) > 1 and len(program.mesh.parts("cp")) == 1:
        program.mesh = program.mesh.split("cp", parts[0][1])
    price = 0.0
    for axis, (kind, _) in zip(program.mesh.parts("cp"), parts, strict=True):
        _prepare(program, axis, kind)
        flow = flow_of(program)
        relations = relations_of(flow)
        batch = batch_dims(program, flow, relations)
        taken = batch if _shares_rows(program) else {}  # without them dim 0 may as well be the sequence

        def allowed(v: int, s: Shard, flow: Flow = flow, taken: dict[int, set[int]] = taken) -> bool:
            node, index = flow.values[v].key
            return s.dim not in taken.get(v, ()) and not clash(s, layouts(node)[index])

        seeds = context_seeds(flow, batch, program.mesh, axis, zigzag)
        found = spread(flow, relations, seeds, allowed)
        solution = solve(flow, _Space(program, context, flow, found, axis, kind).choices())
        context.warnings += report_opaque(flow, found, solution, axis, strict=context.strict)
        context.warnings += check_sequence(flow, solution, axis)
        write(program, flow, axis, solution)
        price += solution.price
    return price, program, context.warnings


def _shares_rows(program: Program) -> bool:
    return program.mesh.data_size > 1 or program.mesh.microbatches > 1


def _prepare(program: Program, axis: str, kind: str) -> None:
    """Attention goes into the ring of ``axis``, or gets as many key heads as Ulysses shares out."""
    for _, graph in program.graphs():
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in ops.ATTENTION:
                continue
            if kind == ULYSSES:
                repeat_keys(graph, node, program.mesh, axis)
            elif dropped := arguments(node)["dropout"]:
                where = f"{node.meta.get('module') or 'attention'}: dropout_p={dropped}"
                fix = "context_parallel=ulysses, or set the attention dropout to 0"
                raise AutoparError("ring-dropout", f"{where} of attention in a ring over {axis}", fix)
            else:
                node.target = ops.ring_attention
                with_arguments(node, axis=axis)


@dataclass
class _Space:
    """The choices on one (sub-)axis of cp."""

    program: Program
    context: Context
    flow: Flow
    found: Candidates
    axis: str
    kind: str

    def choices(self) -> Choices:
        flow, mesh = self.flow, self.program.mesh
        weights, _ = of_parameters(flow)
        options = {n: self._options(n) for n, _ in flow.ops}
        for node, found in options.items():  # what is made of weights alone has no sequence to share out
            if flow.inputs(node) and weights.issuperset(flow.inputs(node)):
                options[node] = [a for a in found if not _shards(a)] or found
        sharded = {n: [_shards(a) for a in found] for n, found in options.items()}
        left = shares(flow, {**dict(mesh.axes), TIME: mesh.microbatches})
        prices = op_prices(flow, self.context.hardware, mesh, self.axis, left)
        convert = conversion_prices(flow, self.context.hardware, mesh, self.axis, left)

        def op_price(node: fx.Node, a: Assignment) -> float:
            if node.target is ops.ring_attention and _shards(a):
                keys = flow.inputs(node)[1:3]
                moved = sum(convert(v, t, R) for v, t in zip(keys, a.inputs[1:3]))
                return max(moved, prices(node, a))
            idle = bool(node.meta.get("diff")) and any(sharded[node]) and not _shards(a)
            return prices(node, a) + (WHOLE if idle else 0.0)

        return Choices(
            types={v: self._types(v) for v in sources(flow)},
            strategies=options,
            outputs=[[P] if out.kind == "loss" else [I] for out in self.program.outputs],
            op_price=op_price,
            source_price=lambda value, kind: 0.0,
            convert_price=convert,
        )

    def _options(self, node: fx.Node) -> list[Assignment]:
        relation = self.found.relations[node]
        if self.kind == ULYSSES and node.target in ops.ATTENTION:
            by_heads = relation.transfer(0, heads_shard(node, self.program.mesh, self.axis))
            assert by_heads is not None and not clashes(node, by_heads)
            return [by_heads]
        found = [a for a in strategies(node, self.found.ports(self.flow, node), relation) if not clashes(node, a)]
        if node.target is not ops.ring_attention:
            return found
        q = tensor_args(node)[0].meta["spec"].shape
        inside = [a for a in found if isinstance(a.inputs[0], Shard) and a.inputs[0].dim == len(q) - 2]
        if not inside:
            where = node.meta.get("module") or "attention"
            why = f"{where}: its positions are shared out over another axis already, and {self.axis} asks for them too"
            fix = "leave sequence_parallel off; where the inputs have the sequence first, say so: batch_dims={name: 1}"
            raise AutoparError("sequence-taken", why, fix)
        return inside

    def _types(self, v: int) -> list[Type]:
        value = self.flow.values[v]
        whole: list[Type] = [R] if value.diff else [I]
        if value.role == "param":
            return whole
        if value.role == "input":
            return [I]
        scalar: list[Type] = [P] if value.spec.shape == () else []
        return [*self.found.shards.get(v, ()), I, *(whole if value.diff else []), *scalar]


def _shards(a: Assignment) -> bool:
    return any(isinstance(t, Shard) for t in (*a.inputs, *a.outputs))
