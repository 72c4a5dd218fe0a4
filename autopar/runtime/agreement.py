"""What ranks tell each other before they act: a mismatch is an error on every rank, never a hang."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.modules import walk

T = TypeVar("T")
LIMIT = 1 << 20  # bytes of rows that are hashed at every call
SAMPLES = 16  # values of each tensor of the model that ranks compare


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

    def __call__(self, text: str, rows: int | None, same: int = 0, own: int = 0) -> tuple[int, ...]:
        """The rows of every data rank, row-major over the data axes.

        Args:
            text: must be equal on all ranks.
            rows: of this data rank; equal on ranks that differ in model axes only.
            same: checksum of inputs that must be equal on all ranks; 0 where unknown.
            own: checksum of this data rank's rows, equal on ranks that differ in model axes only; 0 where unknown.

        Raises AutoparError ``rank-mismatch`` on every rank where they are not.
        """
        mine = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        count = -1 if rows is None else rows
        if self.group is None:
            return (count,) * self.mesh.data_size
        sent = torch.tensor([mine, count, same, own], dtype=torch.int64)
        found = [torch.empty_like(sent) for _ in self.ranks]
        dist.all_gather(found, sent, group=self.group)
        told = [tuple(t.tolist()) for t in found]
        self._equal([t[0] for t in told], "in model (its weights included), inputs other than rows, mode or plan")
        self._equal([t[2] for t in told], "in the values of inputs that have no batch dim")
        by_place: dict[int, tuple[int, int, int]] = {}
        for at, rank, (_, n, _, rows_sum) in zip(self.mesh, self.ranks, told):
            first, count, total = by_place.setdefault(self.mesh.data_rank(at), (rank, n, rows_sum))
            if n != count:
                self._refuse(f"rank {rank} has {n} rows, rank {first} of the same data has {count}")
            if rows_sum and total and rows_sum != total:
                self._refuse(f"ranks {first} and {rank} are one data rank but got different rows")
        return tuple(by_place[i][1] for i in range(self.mesh.data_size))

    def _equal(self, values: list[int], what: str) -> None:
        known = [v for v in values if v]
        if len(set(known)) > 1:
            usual = max(dict.fromkeys(known), key=known.count)
            odd = [r for r, v in zip(self.ranks, values) if v not in (0, usual)]
            self._refuse(f"ranks {odd} differ from the others {what}")

    def _refuse(self, why: str) -> None:
        fix = "call every rank with the same model, structure and mode, and ranks of one data rank with the same rows"
        raise AutoparError("rank-mismatch", f"mesh {self.mesh}: {why}", fix)


def everyones(value: T) -> list[T]:
    """The value of each process. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def of_the_first(make: Callable[[], T]) -> T:
    """What ``make`` gives on the first process, on all. Collective; its error is raised on every process."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    told: list[Any] = [None]
    failed: Exception | None = None
    if alone or dist.get_rank() == 0:
        try:
            told = [make()]
        except Exception as error:
            failed = error
            known = isinstance(error, AutoparError)
            told = [error if known else AutoparError("first-process", f"the first process failed: {error!r}")]
    if not alone:
        dist.broadcast_object_list(told, src=0)
    if failed is not None:
        raise failed
    if isinstance(told[0], AutoparError):
        raise told[0]
    return told[0]


def checksum(tensors: Iterable[torch.Tensor], limit: int | None = None) -> int:
    """A hash of the bytes; 0 (unknown) where there are none. With ``limit``: only of fewer bytes, on the CPU."""
    tensors = list(tensors)
    unknown = limit is not None and (
        any(t.device.type != "cpu" for t in tensors) or sum(t.nbytes for t in tensors) > limit
    )
    if not tensors or unknown:
        return 0
    digest = hashlib.blake2b(digest_size=7)
    for t in tensors:
        raw = t.detach().contiguous().reshape(-1).view(torch.uint8)
        if t.device.type == "cpu":
            digest.update(raw.numpy().tobytes())
        else:  # integer sums, which are the same on every device
            place = torch.arange(raw.numel(), device=raw.device) % 65521
            sums = (int(raw.sum(dtype=torch.int64)), int((raw.to(torch.int64) * place).sum()))
            digest.update(repr(sums).encode())
    return 1 + int.from_bytes(digest.digest(), "little")


def identity(model: nn.Module) -> str:
    """A hash of the names, shapes and dtypes of a model's tensors and of a sample of their values."""
    kinds: dict[Any, int] = {}  # deep models have many tensors of few kinds
    told: list[Any] = []
    for path, module in walk(model):
        for name, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None:
                kind = kinds.setdefault((t.shape, t.dtype, t.requires_grad), len(kinds))
                told.append((path, name, kind, _sample(t)))
    return fingerprint(told, list(kinds))


def _sample(tensor: Tensor) -> list[Any]:
    if tensor.is_meta or not tensor.numel():
        return []
    places = torch.linspace(0, tensor.numel() - 1, SAMPLES, dtype=torch.float64).long().to(tensor.device)
    return list(torch.atleast_1d(tensor.detach())[torch.unravel_index(places, tensor.shape or (1,))].tolist())


def fingerprint(*parts: Any) -> str:
    """A hash of what must be equal on every rank."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
