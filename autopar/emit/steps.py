"""A training step: the loss-only program on all rows at once, or on one microbatch after the other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.mesh import TIME
from autopar.ir.program import Output, Program


@dataclass
class Moving:
    """The handle of the axis ``mb``: like an Axis, but its coordinate is the microbatch that runs now."""

    size: int = 1
    coordinate: int = 0
    name: str = TIME
    group: str = ""


def loss_of(outputs: tuple[Output, ...], values: list[Tensor]) -> Tensor:
    """The loss among a step's values. Raises AutoparError ``no-loss``, ``no-gradient``."""
    kinds = [o.kind for o in outputs]
    if "loss" not in kinds:
        raise no_loss([v.ndim for v, o in zip(values, outputs) if o.kind == "user"])
    loss = values[kinds.index("loss")]
    if not loss.requires_grad:
        raise AutoparError("no-gradient", "the loss depends on no trainable parameter", "unfreeze a parameter")
    return loss


def no_loss(ndims: list[int]) -> AutoparError:
    """The error of a step without a loss, where the model's outputs have so many dims."""
    scalars = sum(n == 0 for n in ndims)
    if scalars == 0:
        return AutoparError("no-loss", "the model returns no loss", "pass loss= to parallelize, or labels")
    which = f"one of {scalars} scalars" if scalars > 1 else "the scalar"
    why = f"the model returns no `loss`, but {len(ndims)} outputs, {scalars} of them scalar"
    return AutoparError("no-loss", why, f"pass loss= to parallelize: from the model's output to {which} or a sum")


def widened(loss: Tensor) -> Tensor:
    """A copy to add up: half precision becomes float32."""
    return loss.to(torch.float32 if loss.dtype in (torch.float16, torch.bfloat16) else loss.dtype, copy=True)


def parts(
    program: Program, tensors: list[Tensor], prologue: Callable[[list[Tensor]], list[Tensor]] | None, moving: Moving
) -> Iterator[list[Tensor]]:
    """The inputs of each microbatch in turn: its rows, and what the prologue found in all rows."""
    count = program.mesh.microbatches
    hoisted = prologue(tensors) if prologue is not None else []
    for step in range(count):
        moving.coordinate = step
        rows = [_rows(t, i.batch_dim, step, count) for t, i in zip(tensors, program.inputs)]
        yield [*rows, *hoisted]


def _rows(x: Tensor, dim: int | None, step: int, count: int) -> Tensor:
    return x if dim is None or count == 1 else x.narrow(dim, step * (x.shape[dim] // count), x.shape[dim] // count)
