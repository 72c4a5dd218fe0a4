"""The state of a running module, and how its ranks act together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from autopar.checkpoint.pieces import Stored, stored
from autopar.emit.across import Across
from autopar.emit.params import Place, held_of
from autopar.errors import AutoparError
from autopar.ir.program import Param
from autopar.runtime.agreement import Agreement
from autopar.runtime.random import Streams

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """The ranks of a mesh. Every method is collective.

    Args:
        rank: this rank's place in the mesh, row-major.
    """

    agree: Agreement
    rank: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.agree.ranks)

    def meet(self, what: str) -> None:
        """Wait until every rank is at the same call. Raises AutoparError ``rank-mismatch`` or ``rank-silent``."""
        fix = f"call {what.split()[0]} on every rank, with the same arguments"
        try:
            self.agree(what, None)
        except AutoparError as error:
            raise AutoparError(error.slug, f"{what}: {error.message}", fix) from error
        except RuntimeError as error:
            raise AutoparError("rank-silent", f"{what}: another rank does not take part: {error}", fix) from error

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        if self.agree.group is None:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value, group=self.agree.group)
        return out

    def agreed(self, what: str, make: Callable[[], T]) -> T:
        """What ``make`` returns, once it has on every rank; where it fails on any, every rank raises that."""
        made: T | None = None
        own: Exception | None = None
        try:
            made = make()
        except Exception as error:
            own = error
        told = self.gather(None if own is None else _told(own))
        if own is not None:
            raise own
        for rank, failed in enumerate(told):
            if failed is not None:
                slug, message, fix = failed
                raise AutoparError(slug, f"{what}: on rank {self.agree.ranks[rank]}: {message}", fix)
        return made  # type: ignore[return-value]


def _told(error: Exception) -> tuple[str, str, str | None]:
    if isinstance(error, AutoparError):
        return error.slug, error.message, error.fix
    return "rank-failed", f"{type(error).__name__}: {error}", None


@dataclass(frozen=True)
class Live:
    """What of a module is saved.

    Args:
        params: its parameters and persistent buffers by first original name.
        tensors: for each that this rank holds its tensors: one, or one for each tied name where they are kept apart.
        across: which ranks of a pipeline hold which.
        streams: the random state; None where the module draws nothing.
    """

    params: Mapping[str, Param]
    tensors: Mapping[str, tuple[Tensor, ...]]
    across: Across
    streams: Streams | None
    peers: Peers

    @staticmethod
    def of(across: Across, tables: Mapping[str, Any], streams: object, agree: object) -> "Live":
        """From a module's parts. Collective where a group of CPU tensors must be made.

        Args:
            tables: for each name (module, table, key), as ``emit.units.Skeleton.tables``.
            agree: the compiler's Agreement; one is made where it is none.
        """
        place, params = across.place, across.params
        kept = {n: p for n, p in params.items() if p.kind == "parameter" or (p.kind == "buffer" and p.persistent)}
        tensors = {}
        for name, param in kept.items():
            if across.holds(param):
                found = [tables[n][1][tables[n][2]] for n in (name, *param.tied)]
                tensors[name] = tuple({id(x): x for x in found}.values())
        rank = 0
        for axis, size in place.mesh.axes:
            rank = rank * size + place.at[axis]
        if not isinstance(agree, Agreement):
            over = place.over
            agree = Agreement.over(place.mesh, (0,) if over is None else tuple(over.mesh.flatten().tolist()))
        drawn = streams if isinstance(streams, Streams) else None
        return Live(kept, tensors, across, drawn, Peers(agree, rank))

    @property
    def place(self) -> Place:
        """Where this rank is."""
        return self.across.place

    def stored(self) -> dict[str, Stored]:
        """Every tensor that this rank holds, by first original name."""
        held = {n: held_of(self.params[n], self.place.mesh) for n in self.tensors}
        return {n: stored(x[0], held[n], self.place, n, self.holders(n)) for n, x in self.tensors.items()}

    def holders(self, name: str) -> tuple[int, ...]:
        """The coordinates along the pipeline of the ranks that hold a tensor."""
        return self.across.holders(self.params[name])
