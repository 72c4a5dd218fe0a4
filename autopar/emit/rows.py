"""Which part of a whole tensor each rank holds: the runs of every dim, cutting them out and putting them back."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, product

import torch
from torch import Tensor

from autopar.ir.layout import Layout, chunk_sizes
from autopar.ir.mesh import Mesh
from autopar.ir.placement import reordered
from autopar.ir.program import Chunk, Spec
from autopar.ir.runs import Run, runs_of
from autopar.runtime._functional import gathered
from autopar.runtime.axis import Axis


@dataclass(frozen=True)
class Box:
    """A contiguous part of a tensor: where it lies in the whole, and where in the local tensor."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]

    def of_local(self, local: Tensor) -> Tensor:
        """The view of the rank's tensor that holds the box."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes)):
            local = local.narrow(dim, start, size)
        return local


@dataclass(frozen=True)
class Held:
    """How a tensor is spread over a mesh; equal ones hold equal rows.

    Args:
        shape: of the whole tensor.
        layout: its type on each axis.
        mesh: with the sub-axes that the layout names.
        chunk: how data ranks share out what the layout gives to a rank; None where they repeat it.
        order: the index of dim 0 that lies at each place which the layout shares out; None where they are in order.
        name: whose it is, for messages.
    """

    shape: tuple[int, ...]
    layout: Layout
    mesh: Mesh
    chunk: Chunk | None = None
    order: tuple[int, ...] | None = None
    name: str = field(default="", compare=False)

    @property
    def shards(self) -> tuple[str, ...]:
        """The axes that shard the tensor and have more than one rank, in mesh order."""
        over = {a for a, _ in self.layout.shards()} | set(self.sharing)
        return tuple(a for a in self.mesh.names if a in over and self.mesh.size(a) > 1)

    @property
    def copies(self) -> int:
        """How many ranks along ``shards`` hold the same part."""
        return math.prod(self.mesh.size(a) for a in self.sharing) // self.chunk.ways if self.chunk else 1

    @property
    def sharing(self) -> tuple[str, ...]:
        """The axes along which ranks share out what the layout gives to each."""
        if self.chunk is None:
            return ()
        return self.mesh.summed_axes if self.chunk.axes is None else self.chunk.axes

    def rows(self, at: Mapping[str, int]) -> tuple[tuple[Run, ...], ...]:
        """For each dim, the runs that the rank at ``at`` holds, in the order of its local tensor."""
        found = rows(self.layout, Spec(self.shape, torch.float32), self.mesh, at)
        if self.order is not None:
            found = (tuple(reordered(found[0], self.order)), *found[1:])
        if self.chunk is None:
            return found
        dim, ways = self.chunk.dim, self.chunk.ways
        shares = chunk_sizes(sum(n for _, n in found[dim]), ways)
        mine = self.mesh.place(self.sharing, at) % ways
        kept = tuple(_clipped(found[dim], sum(shares[:mine]), shares[mine]))
        return (*found[:dim], kept, *found[dim + 1 :])

    def local_shape(self, at: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the tensor that the rank at ``at`` holds."""
        return tuple(sum(n for _, n in runs) for runs in self.rows(at))


def _clipped(runs: Iterable[Run], start: int, length: int) -> Iterator[Run]:
    """What of the runs, put one after another, lies in ``length`` indices from ``start``."""
    offset = 0
    for first, size in runs:
        low, high = max(start, offset), min(start + length, offset + size)
        if high > low:
            yield first + low - offset, high - low
        offset += size


def rows(layout: Layout, spec: Spec, mesh: Mesh, at: Mapping[str, int]) -> tuple[tuple[Run, ...], ...]:
    """For each dim of the whole tensor, the runs that the rank at ``at`` holds, in the order of its local tensor."""
    return tuple(runs_of(layout, dim, length, mesh, at) for dim, length in enumerate(spec.shape))


def boxes(held: Held, at: Mapping[str, int]) -> tuple[Box, ...]:
    """The contiguous parts that the rank at ``at`` holds."""
    placed = [list(zip(r, accumulate((n for _, n in r), initial=0))) for r in held.rows(at)]
    return tuple(
        Box(tuple(r[0] for r, _ in point), tuple(r[1] for r, _ in point), tuple(o for _, o in point))
        for point in product(*placed)
    )


def cut(whole: Tensor, held: Held, at: Mapping[str, int]) -> Tensor:
    """The rank's part of ``whole``, as a contiguous copy that shares no memory with it."""
    local = whole.detach()
    for dim, runs in enumerate(held.rows(at)):
        parts = [local.narrow(dim, start, size) for start, size in runs]
        local = parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else local.narrow(dim, 0, 0)
    return local.clone(memory_format=torch.contiguous_format)


def gather(local: Tensor, held: Held, axes: Mapping[str, Axis]) -> Tensor:
    """The whole tensor on every rank, from each rank's part. Collective over the axes that shard it.

    Communication: b(N-1)/N bytes a rank for each sharding axis of N ranks, b the bytes gathered so far.
    """
    over = held.shards
    if not over:
        return local.detach().clone()
    here = {a: axes[a].coordinate for a in held.mesh.names}
    points = [{**here, **dict(zip(over, c))} for c in product(*(range(held.mesh.size(a)) for a in over))]
    parts = [boxes(held, point) for point in points]
    longest = max(sum(math.prod(b.sizes) for b in part) for part in parts)
    flat = local.detach().new_zeros(longest)
    flat[: local.numel()] = local.detach().reshape(-1)
    for axis in reversed(over):
        flat = gathered(flat, axes[axis])
    whole = local.detach().new_empty(held.shape)
    for i, part in enumerate(parts):
        _put(whole, part, flat[i * longest : (i + 1) * longest])
    return whole


def _put(whole: Tensor, part: Iterable[Box], flat: Tensor) -> None:
    """Copy a rank's flat tensor to its boxes of the whole."""
    part = tuple(part)
    shape = [max((b.local[d] + b.sizes[d] for b in part), default=0) for d in range(whole.dim())]
    local = flat[: math.prod(shape)].view(shape)
    for box in part:
        target = whole
        for dim, (start, size) in enumerate(zip(box.start, box.sizes)):
            target = target.narrow(dim, start, size)
        target.copy_(box.of_local(local))
