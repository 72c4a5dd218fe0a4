"""Whole tensors on the first rank, one at a time."""

from collections.abc import Iterator

from torch import Tensor

from autopar.checkpoint.live import Live
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
    mine = {name: found[0] for name, found in live.tensors.items()}
    for name, whole in live.across.wholes(mine.get, live.params.values()):
        yield live.params[name], whole.to("cpu") if live.peers.rank == 0 else None
