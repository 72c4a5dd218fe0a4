"""Ops that mean something else on a shard than on the whole value."""

from typing import Any

import torch
from torch import Tensor

Runs = tuple[tuple[int, int], ...]
"""First index and length of what a rank holds of a dim, in local order."""


def local_index(index: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Where each index of the whole dim is in this rank's part, and whether it is there (0 where it is not)."""
    place, mine, at = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool), 0
    for start, length in runs:
        inside = (index >= start) & (index < start + length)
        place, mine, at = torch.where(inside, index - start + at, place), mine | inside, at + length
    return place, mine


def mean_of_total(x: Tensor, dim: tuple[int, ...], keepdim: bool, total: int) -> Tensor:
    """This shard's term of a mean over ``total`` elements of the whole: sum over ``dim``, divided by ``total``."""
    return x.sum(dim, keepdim) / total if dim else x / total


def selected(x: Tensor, dim: int, index: int | None) -> Tensor:
    """This shard's term of one index of ``dim``: its own element, or zero where another rank has it (None)."""
    if index is not None:
        return x.select(dim, index)
    nothing = torch.ones((), dtype=torch.bool, device=x.device)
    return x.select(dim, 0).masked_fill(nothing, 0.0)  # not a new tensor: the backward must run on every rank


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *params: Tensor) -> Tensor:
        ctx.rest = [(p.shape, p.dtype) for p in params[count:]]
        return torch.stack(params[:count])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grad.unbind(), *(grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.rest)


def owned_stack(count: int, *params: Tensor) -> Tensor:
    """The first ``count`` parameters, one above the other.

    The others, of which this rank holds nothing, get gradients without elements: every rank has one of every parameter.
    """
    out: Tensor = _Stacked.apply(count, *params)
    return out


def gathered(x: Tensor, dim: int, index: Tensor, runs: Runs, total: int) -> Tensor:
    """This shard's term of ``x.gather(dim, index)``: zero where another rank has the element.

    Args:
        index: of the whole dim. runs: what this rank holds of it. total: its length.

    Raises:
        RuntimeError: an index is outside 0 to ``total`` - 1, on every rank alike.
    """
    place, mine = local_index(index, runs)
    place = place.masked_fill((index < 0) | (index >= total), x.shape[dim])  # the gather itself refuses it
    return x.gather(dim, place).masked_fill(~mine, 0.0)
