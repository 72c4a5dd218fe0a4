"""Loading: every rank reads the boxes that it holds, once all names and shapes are known to agree."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim import Optimizer

from autopar.checkpoint.folder import TRAINING, fault, find
from autopar.checkpoint.live import Live
from autopar.checkpoint.mismatch import Mismatch
from autopar.checkpoint.optimizer import PREFIX, Prepared, names_of, prepare, together
from autopar.checkpoint.pieces import Stored
from autopar.emit.params import shard_of
from autopar.errors import AutoparError

Saved = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def load(live: Live, folder: str | os.PathLike[str], optimizer: Optimizer | None, cast: bool) -> dict[str, Any]:
    """See ``ParallelModule.load``."""
    peers = live.peers
    peers.meet(f"load {os.path.abspath(folder)} cast={cast} optimizer={type(optimizer).__name__}")
    mine = peers.agreed("load", lambda: str(find(folder)) if peers.rank == 0 else "")
    path = Path(peers.gather(mine)[0])
    own = peers.agreed("load", lambda: names_of(optimizer, live) if optimizer is not None else [])
    everywhere = peers.gather(own) if live.across.stages else [own]
    plan = peers.agreed("load", lambda: _Plan.of(live, path, optimizer, together(everywhere), cast))
    peers.agreed("load", plan.read)
    with torch.no_grad():
        for found in live.tensors.values():
            for other in found[1:]:
                shard_of(other).copy_(shard_of(found[0]))
    if plan.prepared is not None:
        plan.prepared.commit()
    if live.streams is not None and plan.rest["streams"] is not None:
        live.streams.load_state_dict(plan.rest["streams"])
    return {"step": plan.rest["step"], "extra": plan.rest["extra"], "folder": path}


@dataclass
class _Plan:
    """A checkpoint that fits, and where it goes."""

    reader: FileSystemReader
    metadata: Metadata
    rest: dict[str, Any]
    tensors: dict[str, Stored]  # by name in the checkpoint
    prepared: Prepared | None

    @staticmethod
    def of(live: Live, path: Path, optimizer: Optimizer | None, groups: list[list[str]], cast: bool) -> "_Plan":
        why = fault(path)
        if why is not None:
            raise AutoparError("incomplete-checkpoint", f"{path}: {why}", "every rank must see the same file system")
        reader = FileSystemReader(path)
        metadata = reader.read_metadata()
        rest = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
        saved = _saved(metadata)
        names = _names(live, saved, cast, str(path))
        tensors = {names[name]: t for name, t in live.stored().items()}
        meta = [n for n, t in tensors.items() if t.local.is_meta]
        if meta:
            raise AutoparError("meta-parameter", f"{meta[0]}: the shard is on the meta device and holds no data", None)
        prepared = None
        if optimizer is not None:
            if rest["optimizer"] is None:
                raise AutoparError("no-optimizer-state", f"{path} was saved without an optimizer", "load without one")
            prepared = prepare(optimizer, live, rest["optimizer"], saved, groups)
            tensors |= prepared.tensors
        return _Plan(reader, metadata, rest, tensors, prepared)

    def read(self) -> None:
        """Read every box into its tensor."""
        self.reader.set_up_storage_reader(self.metadata, False)
        items = []
        for name, t in self.tensors.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, entry, t.chunks())
        with torch.no_grad():
            self.reader.read_data(LoadPlan(items), _Planner(self.tensors)).wait()


class _Planner(DefaultLoadPlanner):
    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensors[index.fqn].at(index)


def _saved(metadata: Metadata) -> Saved:
    """Shape and dtype of every tensor. Raises AutoparError ``incomplete-checkpoint`` where parts are missing."""
    out = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            if sum(c.sizes.numel() for c in entry.chunks) != math.prod(entry.size):
                raise AutoparError("incomplete-checkpoint", f"{name}: parts are missing", "save it again")
            out[name] = (tuple(entry.size), entry.properties.dtype)
    return out


def _names(live: Live, saved: Saved, cast: bool, where: str) -> dict[str, str]:
    """For each of the module's names the one in the checkpoint. Raises AutoparError ``state-dict-mismatch``."""
    return matched(
        {n: (n, *p.tied) for n, p in live.params.items()},
        {n: (p.spec.shape, p.spec.dtype) for n, p in live.params.items()},
        {n: s for n, s in saved.items() if not n.startswith(PREFIX)},
        (), cast, where,
    )  # fmt: skip


def matched(
    names: Mapping[str, tuple[str, ...]], wanted: Saved, saved: Saved, ignored: Iterable[str], cast: bool, where: str
) -> dict[str, str]:
    """For each name the first of its ``names`` that is saved.

    Args:
        ignored: saved names that nobody needs to want.
        cast: whether dtypes may differ.
        where: what the error calls the place.

    Raises:
        AutoparError: ``state-dict-mismatch`` with every missing, unexpected or misshaped name and both shapes.
    """
    out, bad = {}, Mismatch()
    for name, (shape, dtype) in wanted.items():
        found = [n for n in names[name] if n in saved]
        if not found:
            bad.missing.append(f"{name} {list(shape)}")
            continue
        out[name] = found[0]
        for alias in found:
            there, of = saved[alias]
            if there != shape:
                bad.misshaped.append(f"{alias}: shape {list(there)} saved, {list(shape)} in the model")
            elif of != dtype and not cast:
                bad.misshaped.append(f"{alias}: {of} saved, {dtype} in the model (cast=True allows it)")
    known = {n for group in names.values() for n in group} | set(ignored)
    bad.unexpected += [f"{n} {list(s)}" for n, (s, _) in saved.items() if n not in known]
    bad.refuse(where)
    return out
