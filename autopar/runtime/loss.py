"""Token loss and embedding lookup with the vocabulary sharded over a mesh axis.

The loss never gathers logits: only one maximum, one sum of exponentials and one picked logit a token cross the
wire (vocabulary-parallel cross-entropy, Shoeybi et al., Megatron-LM, section 3).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime._functional import reduced
from autopar.runtime.axis import Axis
from autopar.runtime.shards import Runs, local_index


def token_loss(logits: Tensor, target: Tensor, ignore_index: int, axis: Axis | None, runs: Runs, total: int) -> Tensor:
    """Negative log-likelihood of each token, ``F.cross_entropy(reduction="none")`` on the whole classes.

    Two all-reduces, of 1 and 2 numbers a token in the accumulation dtype (float32 for half precision). The
    backward is local.

    Args:
        logits: [..., V_local], S on ``axis``.
        target: [...], classes by global index, whole on every rank.
        ignore_index: the target of tokens whose loss and gradient are 0.
        axis: None where the logits are whole.
        runs: the classes that this rank holds, in local order. total: of classes.

    Returns:
        [...] in the logits' dtype, I on ``axis``. A target that is no class makes its token's loss NaN on every
        rank (an error where the logits are whole).
    """
    if axis is None or axis.size == 1:
        rows = logits.reshape(-1, logits.shape[-1])
        flat = F.cross_entropy(rows, target.reshape(-1), ignore_index=ignore_index, reduction="none")
        return flat.reshape(target.shape)
    out: Tensor = _TokenLoss.apply(logits, target, ignore_index, axis, runs, total)
    return out


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, axis: Axis, runs: Runs, total: int
    ) -> Tensor:
        wide = logits.to(accumulation(logits.dtype))
        ignored = target == ignore_index
        top = wide.amax(-1) if wide.shape[-1] else wide.new_full(target.shape, -torch.inf)
        top = reduced(top, axis, "max")
        picked = _picked(wide, target, runs)
        if axis.coordinate == 0:
            picked = picked.masked_fill(((target < 0) | (target >= total)) & ~ignored, torch.nan)
        exponentials, picked = reduced(torch.stack([(wide - top.unsqueeze(-1)).exp().sum(-1), picked]), axis).unbind()
        log_total = exponentials.log() + top
        ctx.save_for_backward(logits, target, ignored, log_total)
        ctx.runs = runs
        return (log_total - picked).masked_fill(ignored, 0.0).to(logits.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, target, ignored, log_total = ctx.saved_tensors
        wide = (logits.to(log_total.dtype) - log_total.unsqueeze(-1)).exp()
        if wide.shape[-1]:
            index, inside = local_index(target, ctx.runs)
            wide = wide.scatter_add(-1, index.unsqueeze(-1), -inside.unsqueeze(-1).to(wide.dtype))
        scale = grad.to(wide.dtype).masked_fill(ignored, 0.0).unsqueeze(-1)
        # Not a product alone: the softmax of an ignored token may be NaN.
        out = (wide * scale).masked_fill(ignored.unsqueeze(-1), 0.0)
        return out.to(logits.dtype), None, None, None, None, None


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of ``dtype`` are taken."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _picked(wide: Tensor, target: Tensor, runs: Runs) -> Tensor:
    """The target's logit where this rank has it, 0 elsewhere."""
    if not wide.shape[-1]:
        return wide.new_zeros(target.shape)
    index, inside = local_index(target, runs)
    return wide.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)


def vocabulary_embedding(weight: Tensor, ids: Tensor, runs: Runs, padding_idx: int | None, total: int) -> Tensor:
    """Rows of a table of which this rank holds a part; no communication.

    Args:
        weight: [rows, D].
        ids: [...], global row indices, whole on every rank.
        runs: the rows that this rank holds, in local order.
        padding_idx: global row that gets no gradient; negative counts from ``total``.
        total: rows of the whole table.

    Returns:
        [..., D], P on the axis that shards the table: 0 where another rank has the row.

    Raises:
        IndexError: an id is outside 0 to ``total`` - 1, on every rank alike.
    """
    rows = weight.shape[0]
    if rows == 0:
        weight, rows = F.pad(weight, (0, 0, 0, 1)), 1
    local, inside = local_index(ids, runs)
    outside = ids.lt(0) | ids.ge(total)
    padding, at = None, 0
    for start, length in runs:
        if padding_idx is not None and start <= padding_idx % total < start + length:
            padding = at + padding_idx % total - start
        at += length
    # An id that is no row stays one here, so that the lookup itself refuses it, as it does on the whole table.
    picked = F.embedding(local.masked_fill(outside, rows), weight, padding)
    return picked.masked_fill(~inside.unsqueeze(-1), 0.0)
