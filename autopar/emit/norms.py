"""Norms of gradients over a mesh: every element counted once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from autopar.emit.across import Across
from autopar.emit.params import held_of, shard_of
from autopar.errors import AutoparError
from autopar.ir.program import Param
from autopar.runtime._functional import reduced

Pair = tuple[Param, Tensor]


def clip_gradients(
    pairs: Iterable[Pair], across: Across, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Scale the gradients as ``torch.nn.utils.clip_grad_norm_`` does; returns the norm before. Collective."""
    if not norm_type > 0:
        raise AutoparError("bad-norm", f"norm_type is {norm_type}", "use a positive order, or inf")
    grads = [(param, shard_of(p.grad)) for param, p in pairs if p.grad is not None]
    total = total_norm(grads, across, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped.")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for _, grad in grads:
        grad.mul_(scale.to(grad))
    return total


def total_norm(grads: Iterable[Pair], across: Across, order: float) -> Tensor:
    """Norm of this rank's parts of whole tensors, 0-d, equal on every rank. Collective over the axes that shard them.

    Sums are in fp32, or in fp64 where a gradient is. Of what several ranks of a pipeline hold, the first counts.
    """
    place, grads = across.place, [(param, grad) for param, grad in grads if across.counts(param)]
    dtype = torch.float64 if any(g.dtype == torch.float64 for _, g in grads) else torch.float32
    infinite = order == float("inf")
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for param, grad in grads:
        grad = grad.detach() if grad.numel() else grad.new_zeros(1)
        held = held_of(param, place.mesh)
        part = torch.linalg.vector_norm(grad, order, dtype=dtype).to(place.device)
        groups.setdefault(held.shards, []).append(part if infinite else part**order / held.copies)
    total = torch.zeros((), dtype=dtype, device=place.device)
    for over in sorted(groups):
        part = torch.stack(groups[over]).max() if infinite else torch.stack(groups[over]).sum()
        for axis in over:
            part = reduced(part, place.axes[axis], "max" if infinite else "sum")
        total = torch.maximum(total, part) if infinite else total + part
    total = across.joined(total, infinite)
    return total if infinite else total ** (1.0 / order)
