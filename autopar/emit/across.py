"""What the ranks of a pipeline do together: each holds the parameters of its own stages only."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.emit.params import Place, gather_of, shard_of
from autopar.ir.program import Param, Program, Stages
from autopar.runtime._functional import reduced, to_wire

AXIS = "pp"


@dataclass(frozen=True)
class Across:
    """The ranks along ``pp``. Without stages there is one of them, and it holds everything."""

    place: Place
    params: Mapping[str, Param]
    stages: Stages | None

    @staticmethod
    def of(program: Program, place: Place) -> "Across":
        """From any variant of a program: all keep parameters in the same stages."""
        return Across(place, program.params, program.stages)

    @property
    def me(self) -> int:
        """This rank's coordinate."""
        return self.place.axes[AXIS].coordinate if self.stages else 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline."""
        assert self.place.over is not None
        return self.place.over.get_group(AXIS)

    def holders(self, param: Param) -> tuple[int, ...]:
        """The coordinates that hold a tensor: those of the stages that read a parameter, all for anything else."""
        if self.stages is None:
            return (0,)
        if not param.stages:
            return tuple(range(self.place.axes[AXIS].size))
        return tuple(sorted({self.stages.ranks[s] for s in param.stages}))

    def holds(self, param: Param) -> bool:
        """Whether this rank holds the tensor."""
        return self.me in self.holders(param)

    def counts(self, param: Param) -> bool:
        """Whether this rank, of all along the pipeline that hold the tensor, is the first."""
        return self.holders(param)[0] == self.me

    def held(self) -> dict[str, Param]:
        """What this rank holds."""
        return {n: p for n, p in self.params.items() if self.holds(p)}

    def tied(self) -> list[Param]:
        """The trainable parameters that several ranks of the pipeline hold."""
        return [
            p for p in self.params.values() if p.kind == "parameter" and p.trainable and len(self.holders(p)) > 1
        ] if self.stages else []  # fmt: skip

    def share(self, x: Tensor | None, shape: Iterable[int], dtype: torch.dtype, source: int) -> Tensor:
        """What coordinate ``source`` has as ``x``, on every rank of the pipeline. Collective."""
        if self.stages is None:
            assert x is not None
            return x
        here = x.detach().contiguous() if x is not None and self.me == source else None
        made = torch.empty(tuple(shape), dtype=dtype, device=self.place.device) if here is None else here
        if made.numel():
            dist.broadcast(to_wire(made), group=self.group, group_src=source)
        return made

    def wholes(self, tensors: Callable[[str], Tensor | None], params: Iterable[Param]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each parameter or what is spread alike, on every rank. Collective.

        Args:
            tensors: this rank's part by name; None where it has none.
        """
        for param in params:
            mine = tensors(param.name) if self.counts(param) else None
            whole = None if mine is None else gather_of(mine, param, self.place)
            yield param.name, self.share(whole, param.spec.shape, param.spec.dtype, self.holders(param)[0])

    def anywhere(self, flags: Iterable[bool]) -> list[bool]:
        """For each flag whether any rank of the pipeline has it set. Collective."""
        found = list(flags)
        if self.stages is None or not found:
            return found
        told = torch.tensor(found, dtype=torch.int32, device=self.place.device)
        return [bool(x) for x in reduced(told, self.place.axes[AXIS], "max").tolist()]

    def joined(self, total: Tensor, largest: bool) -> Tensor:
        """The sum, or the largest, of each rank's number; float64 where any of them is. Collective."""
        if self.stages is None:
            return total
        wide = self.anywhere([total.dtype == torch.float64])[0]
        total = total.to(torch.float64 if wide else total.dtype)
        return reduced(total, self.place.axes[AXIS], "max" if largest else "sum")

    def add_tied(self, tensors: Mapping[str, Any]) -> None:
        """Add up the gradients of parameters that several ranks hold: the same bits on each. Collective.

        Communication: the gradient to the first of them and back.
        """
        tied = self.tied()
        grads = {p.name: tensors[p.name].grad for p in tied if self.holds(p)}
        for param, wanted in zip(tied, self.anywhere(grads.get(p.name) is not None for p in tied)):
            if wanted and self.holds(param):
                tensor = tensors[param.name]
                if tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor.detach())
                self._add(shard_of(tensor.grad), self.holders(param))

    def _add(self, grad: Tensor, holders: tuple[int, ...]) -> None:
        if not grad.numel():
            return
        first, *others = holders
        wire = grad.contiguous()
        if self.me == first:
            for other in others:
                term = torch.empty_like(wire)
                dist.recv(to_wire(term), group=self.group, group_src=other)
                wire += term
            for other in others:
                dist.send(to_wire(wire), group=self.group, group_dst=other)
        else:
            dist.send(to_wire(wire), group=self.group, group_dst=first)
            dist.recv(to_wire(wire), group=self.group, group_src=first)
        if wire is not grad:
            grad.copy_(wire)
