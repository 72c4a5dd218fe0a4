"""Pass ``zero``: how the data axes hold parameters and reduce gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import gcd, prod
from typing import ClassVar

import torch

from autopar.errors import AutoparError
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.program import Chunk, Engine, Form, Group, Param, Program
from autopar.ir.units import managed, paths_of
from autopar.passes.base import Context, Pass

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16")
OFFLOADS = ("none", "cpu")
MODEL_AXES = 2  # that torch's engines take besides the data axes


@dataclass(frozen=True)
class Zero(Pass):
    """Units, mesh axes, reshard policy, precision and offload of ``fully_shard`` (of ``replicate`` at stage 0).

    Does:
        Gives each parameter to the unit that alone reads it, else to the outer function, one group for each dtype and
        set of axes that its gradient is summed over: experts are R over dp alone where ep shards them. From
        stage 1 on cuts every rank's part over the data ranks: along dim 0, or along another dim that divides where
        dim 0
        does not. Stage 1 reduces once a step, stage 2 with each microbatch, stage 3 also frees what a unit gathered.
    Requires:
        LOCAL.
    Ensures:
        STAGED: every parameter that can be cut is in one group, and no other reducer sums over the data axes.
    Communication:
        Ψ bytes of parameters on a rank, N data ranks, m microbatches, bytes per rank and step: stage 0 and 1
        2Ψ(N-1)/N, stage 2 (m+1)Ψ(N-1)/N, stage 3 3mΨ(N-1)/N less what the outer function's group keeps, m of its bytes.
        With ``shard`` ranks to share out: all_gather and reduce_scatter over those, all_reduce of the rest over copies.
    Limits:
        At most two model axes. Scalars are repeated, and reduced where they are read.
    Sources:
        Rajbhandari et al., ZeRO, arXiv:1910.02054, sections 5 and 7; Zhao et al., PyTorch FSDP, arXiv:2304.11277.
    """

    stage: int = 0
    shard: int = 0
    precision: str = "fp32"
    offload: str = "none"
    prefetch: int = 0

    name: ClassVar[str] = "zero"
    requires: ClassVar[Form] = Form.LOCAL
    produces: ClassVar[Form] = Form.STAGED

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            _refuse(f"zero={self.stage}", "stages are 0, 1, 2 and 3")
        if self.precision not in PRECISIONS:
            _refuse(f"precision={self.precision}", f"one of {', '.join(PRECISIONS)}")
        if self.offload not in OFFLOADS:
            _refuse(f"offload={self.offload}", 'only "cpu"')
        if self.offload != "none" and not self.stage:
            _refuse(f"offload={self.offload} with zero=0", "offloading needs zero=1, 2 or 3")
        if self.shard < 0 or (self.shard and not self.stage):
            _refuse(f"zero_shard_size={self.shard} with zero={self.stage}", "give zero=1, 2 or 3 and a positive size")
        if self.prefetch < 0 or (self.prefetch and not self.stage):
            _refuse(f"prefetch={self.prefetch} with zero={self.stage}", "give zero=1, 2 or 3 and a positive depth")

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        mesh = program.mesh
        axes = tuple(a for a in mesh.summed_axes if mesh.size(a) > 1)
        size = prod(mesh.size(a) for a in axes)
        ways = self._ways(size) if axes and self.stage else 1
        manages: dict[Layout | None, bool] = {}
        homes = {}
        for name, unit in managed(program).items():
            param = program.params[name]
            if param.layout not in manages:
                manages[param.layout] = self._manages(param, mesh)
            if manages[param.layout]:
                homes[name] = unit
        for name in homes if ways > 1 else ():
            program.params[name] = replace(program.params[name], chunk=chunk_of(program.params[name], mesh, ways))
        copies = size // ways
        groups = tuple(_groups(program, homes, self.stage, ways))
        program.engine = Engine(self.stage, axes, ways, copies, self.precision, self.offload, self.prefetch, groups)
        program.form = Form.STAGED
        return program

    def _manages(self, param: Param, mesh: Mesh) -> bool:
        """Whether torch's engine can hold the parameter. Raises AutoparError ``zero-model-axes``."""
        axes, model = param.summed_over(mesh), model_axes(param, mesh)
        if self.stage and axes and len(model) > MODEL_AXES:
            raise AutoparError(
                "zero-model-axes", f"zero={self.stage}: parameters lie on {', '.join(model)} besides the data axes",
                f"use zero=0, or at most {MODEL_AXES} model axes",
            )  # fmt: skip
        return bool(axes) and len(model) <= MODEL_AXES

    def _ways(self, size: int) -> int:
        ways = self.shard or size
        if size % ways:
            sizes = [n for n in range(1, size + 1) if size % n == 0]
            raise AutoparError(
                "zero-shard-size", f"zero_shard_size={ways} does not divide the {size} data ranks",
                f"zero_shard_size in {', '.join(map(str, sizes))}",
            )  # fmt: skip
        return ways


def model_axes(param: Param, mesh: Mesh) -> tuple[str, ...]:
    """The axes with several ranks, stages excepted, that the engine takes the parameter to be laid out on."""
    rest = (a for a in mesh.names if mesh.base(a) != "pp" and mesh.size(a) > 1)
    return tuple(a for a in rest if a not in param.summed_over(mesh))


def ways_of(param: Param, mesh: Mesh, ways: int) -> int:
    """How many ranks share out a parameter, where ``ways`` share out one that all data ranks have."""
    return gcd(ways, prod(mesh.size(a) for a in param.summed_over(mesh)))


def chunk_of(param: Param, mesh: Mesh, ways: int) -> Chunk | None:
    """How data ranks share out each rank's part of the parameter, where ``ways`` share out what all of them have.

    Dim 0, where the engine can pad; but the longest dim that divides on every rank where dim 0 does not.
    """
    assert param.layout is not None
    ways, axes = ways_of(param, mesh, ways), param.summed_over(mesh)
    if ways == 1:
        return None
    shapes = _local_shapes(param.spec.shape, param.layout, mesh)
    even = [d for d in range(len(param.spec.shape)) if all(s[d] % ways == 0 for s in shapes)]
    if not even or 0 in even:
        return Chunk(0, ways, axes)
    return Chunk(max(even, key=lambda d: (param.spec.shape[d], -d)), ways, axes)


@lru_cache(maxsize=4096)
def _local_shapes(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> frozenset[tuple[int, ...]]:
    """Of the parts on all ranks."""
    over = {a for a, _ in layout.shards()}
    points = {tuple((a, c if a in over else 0) for a, c in at.items()) for at in mesh}
    return frozenset(local_shape(shape, layout, mesh, dict(at)) for at in points)


def _groups(program: Program, homes: Mapping[str, str], stage: int, ways: int) -> list[Group]:
    """One for each unit, dtype and set of axes that gradients are summed over."""
    found: dict[tuple[str, torch.dtype, tuple[str, ...]], list[str]] = {}
    order = {path: i for i, path in enumerate((*paths_of(program), ""))}
    for name in sorted(homes, key=lambda n: order[homes[n]]):
        param = program.params[name]
        found.setdefault((homes[name], param.spec.dtype, param.summed_over(program.mesh)), []).append(name)

    @cache
    def elements(shape: tuple[int, ...], layout: Layout) -> int:
        return torch.Size(local_shape(shape, layout, program.mesh, at)).numel()

    at = {a: program.at.get(a, 0) for a in program.mesh.names}
    return [_group(program, unit, tuple(names), stage, ways, elements) for (unit, _, _), names in found.items()]


def _group(
    program: Program, unit: str, names: tuple[str, ...], stage: int, ways: int,
    elements: Callable[[tuple[int, ...], Layout], int],
) -> Group:  # fmt: skip
    params = {n: program.params[n] for n in names}
    sizes = {n: elements(p.spec.shape, p.layout or Layout()) for n, p in params.items()}
    trainable = sum(size for n, size in sizes.items() if program.params[n].trainable)
    first = program.params[names[0]]
    axes, own = first.summed_over(program.mesh), ways_of(first, program.mesh, ways)
    return Group(unit, first.spec.dtype, names, sum(sizes.values()), trainable, stage < 3 or not unit, axes, own)


def _refuse(what: str, fix: str) -> None:
    raise AutoparError("bad-strategy", f"Strategy({what}) is not possible", fix)
