"""Gradients that share memory with nothing else, since parameters add to theirs, and norms scale them, in place.

Autograd sees to that for the tensors that it knows. It does not see what a DTensor wraps, and what is asked of
``torch.autograd.grad`` it gives as it comes: where two parameters are added, both gradients are one tensor.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def owned(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Each of ``grads`` where nothing else has its memory, else a copy; contiguous.

    Args:
        grads: just given by autograd, to this reader alone.
    """
    times = Counter(map(id, grads))
    return [
        g if g is None or times[id(g)] == 1 and g.is_contiguous() and _alone(g)
        else g.clone(memory_format=torch.contiguous_format) for g in grads
    ]  # fmt: skip


def _alone(grad: Tensor) -> bool:
    """Whether one tensor, or a view of all of another that nothing else has, is all that refers to the memory."""
    storage, base = grad.untyped_storage(), grad._base
    if storage.nbytes() != grad.numel() * grad.element_size() or _uses(grad) != 1:
        return False
    references = torch._C._storage_Use_Count(storage._cdata) - 1  # but ours
    return bool(references == 1 if base is None else references == 2 and _uses(base) == 2)


def _uses(x: Any) -> int:
    """How many references to a tensor are known outside of Python and as its own; 0 where torch does not say."""
    return int(x._use_count()) if hasattr(x, "_use_count") else 0
