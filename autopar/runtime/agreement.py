"""What ranks tell each other before they act: a mismatch is an error on every rank, never a hang."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class Agreement:
    """Exchanges fingerprints and row counts over all ranks of the mesh.

    Args:
        ranks: global rank at each place of the mesh, row-major.
        group: a process group of CPU tensors over ``ranks``; None where there is one rank.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @staticmethod
    def over(mesh: Mesh, ranks: tuple[int, ...]) -> "Agreement":
        """Collective over all processes where a CPU group must be made."""
        if mesh.world == 1:
            return Agreement(mesh, ranks, None)
        world = dist.group.WORLD
        if dist.get_backend() != "nccl" and ranks == tuple(range(dist.get_world_size())):
            return Agreement(mesh, ranks, world)
        return Agreement(mesh, ranks, dist.new_group(list(ranks), backend="gloo"))

    def __call__(self, text: str, rows: int | None) -> tuple[int, ...]:
        """The rows of every data rank, row-major over the data axes.

        Raises AutoparError ``rank-mismatch`` on every rank where the texts differ, or where ranks that hold the same rows
        disagree about how many.
        """
        mine = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        count = -1 if rows is None else rows
        if self.group is None:
            return (count,) * self.mesh.data_size
        sent = torch.tensor([mine, count], dtype=torch.int64)
        found = [torch.empty_like(sent) for _ in self.ranks]
        dist.all_gather(found, sent, group=self.group)
        pairs = [(int(h), int(n)) for h, n in (t.tolist() for t in found)]
        self._check(pairs)
        by_place: dict[tuple[int, ...], int] = {}
        for at, (rank, (_, n)) in zip(self.mesh, enumerate(pairs)):
            place = self._data_place(at)
            if by_place.setdefault(place, n) != n:
                self._refuse(f"rank {rank} has {n} rows, another rank of the same data has {by_place[place]}")
        return tuple(by_place.values())

    def _data_place(self, at: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(at[a] for a in self.mesh.data_axes)

    def _check(self, pairs: list[tuple[int, int]]) -> None:
        hashes = [h for h, _ in pairs]
        if len(set(hashes)) > 1:
            usual = max(set(hashes), key=hashes.count)
            odd = [r for r, h in zip(self.ranks, hashes) if h != usual]
            self._refuse(f"ranks {odd} differ from the others in model, inputs other than rows, mode or plan")

    def _refuse(self, why: str) -> None:
        raise AutoparError("rank-mismatch", f"mesh {self.mesh}: {why}", "call every rank with the same model and structure")
