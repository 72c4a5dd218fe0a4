"""Blocks whose backward computes inner values again: ``torch.utils.checkpoint`` around the function of a kind.

The function takes everything as arguments: parameters (whose memory the engine fills again before the backward),
buffers
as they were, and the random state of the call. So the second run computes what the first did, whatever ran in between.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT = {"mm", "bmm", "addmm", "baddbmm", "convolution", "_grouped_mm"}


def recomputed(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """``function``, keeping for its backward what ``policy`` ("none", "selective", "full") says."""
    if policy == "none":
        return function
    options: dict[str, Any] = {}
    if policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

        def inner(*tensors: Tensor) -> Any:
            given = dict(zip(places, tensors))
            return function(*[given.get(i, a) for i, a in enumerate(args)])

        return checkpoint(inner, *[args[i] for i in places], use_reentrant=False, preserve_rng_state=False, **options)

    return run


def keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of products, attention and collectives; compute the rest again."""
    name = op.name().partition("::")[2].partition(".")[0] if hasattr(op, "name") else str(op)
    collective = getattr(op, "namespace", "") == "_c10d_functional" and name != "wait_tensor"
    attention = "attention" in name and not name.endswith("_backward")
    kept = name in _KEPT or attention or collective
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
