"""The ``spmd-types`` checker over functions that use the runtime's conversions, on one rank of a mesh."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import spmd_types as spmd
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ir.mesh import Mesh
from autopar.runtime.axis import Axis, axes_of, device_mesh_of
from tests.runtime.table import ROWS

TYPES = {"I": spmd.I, "R": spmd.R, "P": spmd.P, "S": spmd.V}


def group(axis: Axis) -> dist.ProcessGroup:
    """The axis's process group."""
    return dist.distributed_c10d._resolve_process_group(axis.group)


def typed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A conversion that checks its input's type on its axis, and stamps its output's; other functions unchanged."""
    row = ROWS.get(function.__name__)
    kinds = ("S", "S") if function.__name__ == "all_to_all" else row and (row.src, row.dst)
    if kinds is None:
        return function

    def checked(*args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        x, axis = bound["x"], bound["axis"]
        if axis.size == 1:
            return x
        spmd.assert_type(x, {group(axis): TYPES[kinds[0]]})
        kept = dict(spmd.get_local_type(x))
        with spmd.no_typecheck():
            out = function(*args, **kwargs)
            out = out.view_as(out) if out is x else out  # types stick to tensors, and a row may give back its input
        return spmd.assert_type(out, {**kept, spmd.normalize_axis(group(axis)): TYPES[kinds[1]]})

    return checked


@contextmanager
def checking(text: str) -> Iterator[dict[str, Axis]]:
    """The axes of a mesh on rank 0 of a fake process group, with the strict checker on."""
    mesh = Mesh.parse(text)
    dist.init_process_group("fake", rank=0, world_size=mesh.world, store=FakeStore())
    try:
        axes = axes_of(mesh, device_mesh_of(mesh, "cpu"))
        with typecheck(strict_mode="strict", local=True):
            yield axes
    finally:
        dist.destroy_process_group()


def stamp(x: Tensor, axes: dict[str, Axis], **kinds: str) -> Tensor:
    """Give ``x`` a type on every axis: ``stamp(x, axes, tp="S", dp="R")``."""
    return spmd.assert_type(x, {group(axes[a]): TYPES[k] for a, k in kinds.items()})
