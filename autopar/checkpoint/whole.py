"""Whole tensors on the first rank, one at a time."""

from collections.abc import Iterator

from torch import Tensor

from autopar.checkpoint.live import Live
from autopar.emit.params import held_of, shard_of
from autopar.emit.rows import gather
from autopar.ir.program import Param


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
        whole = gather(shard_of(x), held, live.place.axes)
        yield param, whole.to("cpu") if live.peers.rank == 0 else None
