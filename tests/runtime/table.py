"""The conversion table as data, and what its types mean, by index lists rather than by the runtime's own cuts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.mesh import Mesh
from autopar.runtime import collectives as c
from autopar.runtime.axis import Axis, axes_of
from autopar.runtime.segments import Segments
from autopar.runtime.simulate import device_mesh

DUAL = {"I": "I", "R": "P", "P": "R", "S": "S"}


@dataclass(frozen=True)
class Row:
    src: str
    dst: str
    function: Callable[..., Tensor]
    takes_dim: bool
    forward: tuple[str, ...]
    backward: tuple[str, ...]

    def __call__(self, x: Tensor, dim: int, axis: Axis, segments: Segments | None) -> Tensor:
        return self.function(x, dim, axis, segments) if self.takes_dim else self.function(x, axis)


GATHER, REDUCE, SCATTER = ("all_gather_into_tensor",), ("all_reduce",), ("reduce_scatter_tensor",)
ROWS = {
    row.function.__name__: row
    for row in (
        Row("S", "R", c.all_gather, True, GATHER, SCATTER),
        Row("S", "I", c.all_gather_invariant, True, GATHER, ()),
        Row("S", "P", c.shard_to_partial, True, (), ()),
        Row("I", "R", c.to_replicated, False, (), REDUCE),
        Row("I", "S", c.slice_invariant, True, (), GATHER),
        Row("I", "P", c.invariant_to_partial, False, (), ()),
        Row("R", "S", c.slice_replicated, True, (), ()),
        Row("R", "I", c.to_invariant, False, (), ()),
        Row("R", "P", c.replicated_to_partial, False, (), ()),
        Row("P", "I", c.all_reduce_invariant, False, REDUCE, ()),
        Row("P", "R", c.all_reduce, False, REDUCE, REDUCE),
        Row("P", "S", c.reduce_scatter, True, SCATTER, GATHER),
    )
}


def segment_cases(ways: int) -> dict[str, Segments | None]:
    """Plain, uneven with an empty share, a batch factor, an interleaved dim, fused dims."""
    even, ramp = (2,) * ways, tuple(range(ways))
    return {
        "plain": None,
        "plain-as-segments": ((1, even, 1),),
        "uneven": ((1, ramp, 1),),
        "batch-factor": ((1, tuple(n + 1 for n in ramp), 2),),
        "interleaved": ((3, even, 2),),
        "fused": ((1, even, 2), (1, (1,) * ways, 1)),
        "fused-uneven": ((2, ramp, 1), (1, ramp[::-1], 2)),
        "nothing": ((2, (0,) * ways, 1),),
    }


def held(segments: Segments | None, ways: int) -> list[list[int]]:
    """Global indices that each coordinate holds, in its local order."""
    out: list[list[int]] = [[] for _ in range(ways)]
    at = 0
    for outer, counts, inner in segments or ((1, (2,) * ways, 1),):
        for _ in range(outer):
            for coordinate, count in enumerate(counts):
                out[coordinate] += range(at, at + count * inner)
                at += count * inner
    return out


def meaning(kind: str, locals_: list[Tensor], dim: int, owners: list[list[int]]) -> Tensor:
    """The whole value that the ranks' tensors stand for."""
    if kind in "IR":
        for other in locals_[1:]:
            torch.testing.assert_close(other, locals_[0], rtol=0, atol=0)
        return locals_[0]
    if kind == "P":
        return torch.stack(locals_).sum(0)
    shape = list(locals_[0].shape)
    shape[dim] = sum(map(len, owners))
    whole = torch.full(shape, torch.nan, dtype=locals_[0].dtype)
    for local, owned in zip(locals_, owners):
        assert local.shape[dim] == len(owned)
        whole.movedim(dim, 0)[owned] = local.movedim(dim, 0)
    return whole


def sample(kind: str, rank: int, dim: int, owners: list[list[int]], seed: int) -> Tensor:
    """A random local tensor of the kind, of three dims, not contiguous."""
    shape = [2, 3, 4]
    shape[dim] = sum(map(len, owners)) if kind != "S" else len(owners[rank])
    generator = torch.Generator().manual_seed(seed if kind in "IR" else 1000 * seed + rank)
    return torch.randn(shape[::-1], generator=generator, dtype=torch.float64).permute(2, 1, 0)


def axis_of(ways: int) -> Axis:
    """The one axis of a mesh of ``ways`` ranks, inside ``run_ranks``."""
    mesh = Mesh.of({"tp": ways})
    return axes_of(mesh, device_mesh(mesh))["tp"]


class Issued(TorchDispatchMode):
    """Notes the name and the input's elements of every collective issued in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.names.append(func.name().split("::")[1])
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))
