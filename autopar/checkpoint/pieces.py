"""Which boxes of a whole tensor this rank holds, and which of them it writes."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autopar.emit.across import AXIS
from autopar.emit.params import Place, shard_of
from autopar.emit.rows import Box, Held, boxes


@dataclass(frozen=True)
class Stored:
    """A tensor as a checkpoint sees it.

    Args:
        shape: of the whole.
        local: this rank's part.
        boxes: where the parts of ``local`` lie in the whole.
        owned: whether this rank writes them; of all ranks that hold the same, one does.
    """

    shape: tuple[int, ...]
    local: Tensor
    boxes: tuple[Box, ...]
    owned: bool

    def staged(self) -> "Stored":
        """With a copy of the values on the CPU, as they are now; without it where another rank writes them."""
        if not self.owned:
            return self
        return replace(self, local=self.local.detach().to("cpu", copy=True))

    def items(self, name: str) -> list[WriteItem]:
        """What this rank writes."""
        if not self.owned:
            return []
        properties, size = TensorProperties.create_from_tensor(self.local.detach()), torch.Size(self.shape)
        return [
            WriteItem(
                MetadataIndex(name, c.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(c, properties, size)
            )
            for c in self.chunks()
        ]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes, as checkpoints name them."""
        return [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.sizes)) for b in self.boxes]

    def at(self, index: MetadataIndex) -> Tensor:
        """The view of ``local`` that holds the box at an offset."""
        box = next(b for b in self.boxes if b.start == tuple(index.offset or ()))
        return box.of_local(self.local.detach())


def stored(x: Tensor, held: Held, place: Place, key: str, holders: tuple[int, ...] = ()) -> Stored:
    """A parameter or buffer that is held as ``held`` says, or a tensor of an optimizer that is as large.

    Args:
        key: spreads the writing of what several ranks hold over them.
        holders: coordinates along the pipeline that hold the tensor; all where empty.
    """
    if 0 in held.shape:
        return _empty(held.shape, x, place, holders)
    found, local = boxes(held, place.at), shard_of(x)
    assert sum(math.prod(b.sizes) for b in found) == local.numel(), (key, held, tuple(local.shape))
    return Stored(held.shape, local, found, owned(x, place, key, holders))


def stored_as_placed(x: Tensor, place: Place, key: str, holders: tuple[int, ...] = ()) -> Stored:
    """Any other tensor: the same on all ranks, or what its placements say."""
    if 0 in x.shape:
        return _empty(tuple(x.shape), x, place, holders)
    local = shard_of(x)
    if not isinstance(x, DTensor):
        return Stored(tuple(x.shape), local, (_whole(x),), owned(x, place, key, holders))
    chunks = x.__create_chunk_list__()
    home = (0,) * x.dim()
    found = tuple(Box(tuple(c.offsets), tuple(c.sizes), home) for c in chunks if c.sizes.numel())
    return Stored(tuple(x.shape), local, found, owned(x, place, key, holders))


def _empty(shape: tuple[int, ...], x: Tensor, place: Place, holders: tuple[int, ...]) -> Stored:
    """A tensor without elements: no shard has a box of it, and the first rank that knows it writes its name."""
    first = {axis: holders[0] if axis == AXIS and holders else 0 for axis, _ in place.mesh.axes}
    local = shard_of(x).detach().new_empty(shape)
    return Stored(shape, local, (_whole(local),), all(place.at[axis] == at for axis, at in first.items()))


def _whole(x: Tensor) -> Box:
    home = (0,) * x.dim()
    return Box(home, tuple(x.shape), home)


def owned(x: Tensor, place: Place, key: str, holders: tuple[int, ...] = ()) -> bool:
    """Whether this rank, of all that hold the same part of ``x``, is the one that writes it."""
    pick = zlib.crc32(key.encode())
    for coordinate, ways in _copies(x, place, holders):
        pick, chosen = divmod(pick, ways)
        if chosen != coordinate:
            return False
    return True


def _copies(x: Tensor, place: Place, holders: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(this rank's coordinate, ranks) along everything that does not change what a rank holds."""
    apart: list[bool] = [False] * len(place.mesh.axes)
    if isinstance(x, DTensor) and place.over is not None:
        here = x.device_mesh.get_coordinate()
        assert here is not None
        for i, placement in enumerate(x.placements):
            if placement.is_replicate():
                yield here[i], x.device_mesh.size(i)
        ranks = torch.isin(place.over.mesh.contiguous(), x.device_mesh.mesh.contiguous()).nonzero()
        apart = [bool((column != column[0]).any()) for column in ranks.T]
    for (axis, size), covered in zip(place.mesh.axes, apart):
        if axis == AXIS and holders and size > 1:
            yield holders.index(place.at[axis]), len(holders)
        elif not covered:
            yield place.at[axis], size
