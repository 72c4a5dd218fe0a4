"""Rows that travel while something else is computed, in the backward as well."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime._functional import arrived, departed
from autopar.runtime.axis import Axis
from autopar.runtime.collectives import exchange_rows


@dataclass(frozen=True)
class Parcel:
    """Rows of dim 0 on their way between the ranks of an axis.

    Args:
        x: what was sent. moving: what comes, not to be read before it has arrived; None where nothing has set out.
    """

    x: Tensor
    moving: Tensor | None
    axis: Axis
    receive: list[int]
    send: list[int]

    def arrive(self) -> Tensor:
        """Wait for the rows. The backward sends their gradients back, for which it waits where they set out."""
        if self.moving is None:
            return exchange_rows(self.x, self.axis, self.receive, self.send)
        if not self.x.requires_grad:
            return arrived(self.moving)
        out: Tensor = _End.apply(self.x, self.moving, self.axis, self.receive, self.send)
        return out


def depart(x: Tensor, axis: Axis, receive: list[int], send: list[int], now: bool) -> Parcel:
    """Rows sent to, and received from, each coordinate in order: ``now``, or where they are waited for."""
    if not now or axis.size == 1:
        return Parcel(x, None, axis, receive, send)
    if x.requires_grad and torch.is_grad_enabled():
        x = _Begin.apply(x)
    return Parcel(x, departed(x.detach(), axis, receive, send), axis, receive, send)


class _Begin(torch.autograd.Function):
    """Where rows set out, and where the gradients that ``_End`` has sent back arrive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return arrived(grad)


class _End(torch.autograd.Function):
    """Where rows arrive. Its input is what was sent, so that the gradient on its way has the shape of a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moving: Tensor, axis: Axis, receive: list[int], send: list[int]) -> Tensor:
        ctx.way = axis, send, receive
        return arrived(moving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return departed(grad, *ctx.way), None, None, None, None
