"""Which dims of a program's outputs are rows of the batch: by factors, not by their size."""

from dataclasses import replace

from torch import fx

from autopar.ir.layout import Piece, Shard
from autopar.ir.program import Program
from autopar.solve.candidates import Candidates, relations_of, spread
from autopar.solve.flow import flow_of
from autopar.solve.sources import sources


def settle_outputs(program: Program) -> Program:
    """The program with the batch dim of each output of the model.

    A dim is rows of the batch if its factor comes from the inputs' batch dims, and stands where inputs have theirs (dim
    0, or what ``batch_dims`` said) or first. Where the factor is lost on the way (an op along the batch), a dim as long
    as the batch is taken for it, unless it comes from a dim of a parameter or from another dim of an input.
    """
    total = sum(program.rows)
    if total < 2:
        return program
    flow = flow_of(program)
    relations = relations_of(flow)
    batch: list[tuple[int, Shard]] = []
    other: list[tuple[int, Shard]] = []
    for v in sources(flow):
        value = flow.values[v]
        own = program.inputs[value.key[0].meta["input"]].batch_dim if value.role == "input" else None
        if value.role == "argument":
            continue
        for dim, length in enumerate(value.spec.shape):
            if length > 1:
                (batch if dim == own else other).append((v, Shard(dim, (Piece(length, length, 1),))))
    rows, others = spread(flow, relations, batch), spread(flow, relations, other)
    places = {i.batch_dim for i in program.inputs if i.batch_dim is not None}
    end = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    outputs = []
    for out, arg in zip(program.outputs, end.args[0], strict=True):
        if out.kind == "user" and isinstance(arg, fx.Node):
            v, shape = flow.of(arg), arg.meta["spec"].shape
            sure = [
                d for d in sorted(places | {0}) if d < len(shape) and shape[d] == total and _pure(rows, v, d, total)
            ]
            maybe = [
                d for d in sorted(places) if d < len(shape) and shape[d] == total and not _pure(others, v, d, total)
            ]
            out = replace(out, batch_dim=next(iter([*sure, *maybe]), None))
        outputs.append(out)
    return replace(program, outputs=tuple(outputs))


def _pure(found: Candidates, value: int, dim: int, length: int) -> bool:
    """Whether all of the dim is one factor that was carried there."""
    return Shard(dim, (Piece(length, length, 1),)) in found.shards.get(value, ())
