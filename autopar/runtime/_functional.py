"""The functional collectives of c10d on contiguous tensors, by chunks of dim 0.

The ops themselves, rather than ``torch.distributed._functional_collectives``: that module's names changed between
torch 2.11 and 2.13, and its asynchronous tensor subclass costs more in Python than it overlaps here.
"""

import torch
import torch.distributed._functional_collectives  # registers the ops' fake kernels
from torch import Tensor

from autopar.runtime.axis import Axis

_ops = torch.ops._c10d_functional


def reduced(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """All-reduce of ``x`` ("sum", "max" or "min")."""
    if x.is_complex():
        return torch.view_as_complex(reduced(torch.view_as_real(x), axis, op))
    return _wait(_ops.all_reduce(x.contiguous(), op, axis.group))


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """The coordinates' ``x`` [d, ...] one after another: [size * d, ...]."""
    wire = to_wire(x)
    if wire.numel() == 0:
        return x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    return _from_wire(_wait(_ops.all_gather_into_tensor(wire, axis.size, axis.group)), x.dtype)


def scattered(x: Tensor, axis: Axis) -> Tensor:
    """This coordinate's chunk [d, ...] of the sum of ``x`` [size * d, ...]."""
    wire = to_wire(x)
    if wire.numel() == 0:
        return x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    return _from_wire(_wait(_ops.reduce_scatter_tensor(wire, "sum", axis.size, axis.group)), x.dtype)


def exchanged(x: Tensor, axis: Axis, receive: list[int], send: list[int]) -> Tensor:
    """Rows of dim 0 sent to, and received from, each coordinate in order."""
    return _from_wire(_wait(_ops.all_to_all_single(to_wire(x), receive, send, axis.group)), x.dtype)


def departed(x: Tensor, axis: Axis, receive: list[int], send: list[int]) -> Tensor:
    """``exchanged`` on the way: a floating tensor to be read through ``arrived``."""
    out: Tensor = _ops.all_to_all_single(x.contiguous(), receive, send, axis.group)
    return out


def arrived(x: Tensor) -> Tensor:
    """What ``departed`` started, once it is here."""
    return _wait(x)


def _wait(x: Tensor) -> Tensor:
    out: Tensor = _ops.wait_tensor(x)
    return out


def to_wire(x: Tensor) -> Tensor:
    """``x`` in a dtype that every backend sends; of contiguous ``x`` a view."""
    x = x.contiguous()
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    return torch.view_as_real(x) if x.is_complex() else x


def _from_wire(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return x.view(torch.bool)
    return torch.view_as_complex(x) if dtype.is_complex else x
