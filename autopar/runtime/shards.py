"""Ops that mean something else on a shard than on the whole value."""

import torch
from torch import Tensor


def mean_of_total(x: Tensor, dim: tuple[int, ...], keepdim: bool, total: int) -> Tensor:
    """This shard's term of a mean over ``total`` elements of the whole: sum over ``dim``, divided by ``total``."""
    return x.sum(dim, keepdim) / total if dim else x / total


def selected(x: Tensor, dim: int, index: int | None) -> Tensor:
    """This shard's term of one index of ``dim``: its own element, or zero where another rank has it (None)."""
    if index is not None:
        return x.select(dim, index)
    nothing = torch.ones((), dtype=torch.bool, device=x.device)
    return x.select(dim, 0).masked_fill(nothing, 0.0)  # not a new tensor: the backward must run on every rank
