"""Whole tensors on the first rank, one at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.checkpoint.live import Live
from autopar.checkpoint.pieces import cuts
from autopar.emit.params import Place, held_of, shard_of
from autopar.emit.rows import Held, gather
from autopar.ir.program import Param
from autopar.runtime._functional import gathered
from autopar.runtime.axis import Axis


def full_state_dict(live: Live) -> dict[str, Tensor]:
    """See ``ParallelModule.full_state_dict``."""
    out: dict[str, Tensor] = {}
    for param, whole in wholes(live):
        if whole is not None:
            out |= dict.fromkeys((param.name, *param.tied), whole)
    return out


def wholes(live: Live) -> Iterator[tuple[Param, Tensor | None]]:
    """Each parameter and persistent buffer, whole and on the CPU on the first rank; None elsewhere. Collective.

    No rank holds more than one of them at a time.
    """
    for name, param in live.params.items():
        x, held = live.tensors[name][0], held_of(param, live.place.mesh)
        whole = gather(model_part(x, held, live.place), held, live.place.axes)
        first = live.peers.rank == 0
        yield param, whole.to("cpu") if first else None


def model_part(x: Tensor, held: Held, place: Place) -> Tensor:
    """What ``held`` gives to this rank, of a tensor that an engine may have cut once more. Collective over its axes.

    Communication: b(N-1)/N bytes a rank for each cutting axis of N ranks, b the bytes gathered.
    """
    local = shard_of(x)
    for cut in reversed(cuts(x, held, place)):
        assert isinstance(x, DTensor)
        size, group = len(cut.sizes), x.device_mesh.get_group(cut.index)
        axis = Axis(str(cut.index), size, cut.coordinate, group.group_name)
        rows = local.movedim(cut.dim, 0).contiguous()
        padded = rows.new_zeros((max(cut.sizes), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        every = gathered(padded, axis).unflatten(0, (size, -1))
        local = torch.cat([part[:n] for part, n in zip(every, cut.sizes)]).movedim(0, cut.dim)
    return local
