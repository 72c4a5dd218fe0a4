"""The stages of a pipeline as rows of text."""

from collections.abc import Iterable
from dataclasses import replace

from autopar.ir.describe import dtype_name, scaled
from autopar.ir.layout import Layout, local_shape
from autopar.ir.program import Param, Program, Stages
from autopar.ir.stages import Crossing, Part, parts_of

SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def title(stages: Stages) -> str:
    """One line: how many stages, on how many ranks, in which order, and why."""
    ranks = len(set(stages.ranks))
    text = f"pipeline {stages.schedule}, {len(stages.names)} stages on {ranks} ranks, "
    text += f"{stages.microbatches} microbatch{'es' if stages.microbatches != 1 else ''}"
    return text + (f": {stages.reason}" if stages.reason else "")


def rows(program: Program) -> list[tuple[str, ...]]:
    """For each stage: its rank, first module, parameters, predicted time, and what it sends on."""
    assert program.stages is not None
    parts, stages = parts_of(program), program.stages
    return [_row(program, part, stages.names[part.index], stages) for part in parts]


def _row(program: Program, part: Part, name: str, stages: Stages) -> tuple[str, ...]:
    params = [program.params[n] for n in part.params if program.params[n].kind == "parameter"]
    held = sum(_bytes(program, p) for p in params)
    times = stages.seconds[part.index] if stages.seconds else None
    took = f"F {_time(times[0])} B {_time(times[1] + times[2])}" if times else ""
    return (
        f"stage {part.index}", f"rank {stages.ranks[part.index]}", name,
        f"{len(params)} parameter{'s' if len(params) != 1 else ''}", scaled(held, 1024, SIZES), took, _sent(part.sent),
    )  # fmt: skip


def _bytes(program: Program, param: Param) -> int:
    at = {a: program.at.get(a, 0) for a in program.mesh.names}
    shape = local_shape(param.spec.shape, param.layout or Layout(), program.mesh, at)
    return replace(param.spec, shape=shape).bytes


def _time(seconds: float) -> str:
    return scaled(round(seconds * 1e9), 1000, ("ns", "µs", "ms", "s"))


def _sent(values: Iterable[Crossing]) -> str:
    values = list(values)
    if not values:
        return ""
    total = scaled(sum(v.spec.bytes for v in values), 1024, SIZES)
    kinds = [f"{dtype_name(v.spec.dtype)}{list(v.spec.shape)}{'' if v.grad else ' without gradient'}" for v in values]
    return f"sends {total}: {', '.join(kinds)}"
