"""A copy of a model that can be traced but holds no weights."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def blueprint(model: nn.Module, lower: torch.dtype | None = None) -> nn.Module:
    """The model with fake parameters and buffers: shapes, dtypes and devices, no storage. Meta becomes the CPU.

    Args:
        lower: dtype that parameters in float32 get instead; buffers keep theirs.

    Unlike on the meta device, code that makes tensors on the default device, or constants, traces as it would for real.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    memo: dict[int, Any] = {}
    with mode:
        for p in model.parameters():
            dtype = lower if lower is not None and p.dtype == torch.float32 else p.dtype
            memo[id(p)] = nn.Parameter(_like(p, dtype), requires_grad=p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = _like(b, b.dtype)
    return deepcopy(model, memo)


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    device = torch.device("cpu") if x.is_meta else x.device
    return torch.empty(x.shape, dtype=dtype, device=device)


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The fake mode of a blueprint; None for a model with real tensors."""
    for x in (*model.parameters(), *model.buffers()):
        if isinstance(x, FakeTensor):
            return x.fake_mode
    return None
