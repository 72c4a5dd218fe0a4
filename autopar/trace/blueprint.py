"""A copy of a model that can be traced but holds no weights."""

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.trace.layers import plain_attributes
from autopar.trace.state import INTERNAL, tensors_in


def blueprint(model: nn.Module, lower: torch.dtype | None = None) -> nn.Module:
    """The model with fake parameters and buffers: shapes, dtypes and devices, no storage. Meta becomes the CPU.

    Args:
        lower: dtype that parameters in float32 get instead; buffers keep theirs.

    Unlike on the meta device, code that makes tensors on the default device, or constants, traces as it would for real.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    memo: dict[int, Any] = {}
    for p in model.parameters():
        dtype = lower if lower is not None and p.dtype == torch.float32 else p.dtype
        like = memo[id(p)] = _like(mode, p, dtype).requires_grad_(p.requires_grad)
        like._is_param = True
        if p._backward_hooks:
            like._backward_hooks = p._backward_hooks  # to be refused
    for b in model.buffers():
        memo[id(b)] = _like(mode, b, b.dtype)
    keep_computed(model, memo)
    for module in model.modules():
        if _usual(module):
            memo[id(module)] = module.__new__(type(module))
    for module in model.modules():
        if _usual(module):
            memo[id(module)].__dict__.update({k: _copied(v, memo) for k, v in module.__dict__.items()})
    return deepcopy(model, memo)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that was run."""
    memo: dict[int, Any] = {}
    keep_computed(model, memo)
    return deepcopy(model, memo)


def keep_computed(model: nn.Module, memo: dict[int, Any]) -> None:
    """Give ``deepcopy`` values for what it refuses: tensors that a forward left in attributes with a graph."""
    for module in model.modules():
        for name, value in plain_attributes(module):
            if name not in INTERNAL:
                for x in tensors_in(value):
                    if not x.is_leaf:
                        memo.setdefault(id(x), x.detach().clone())


def _usual(module: nn.Module) -> bool:
    """Whether ``deepcopy`` would copy the module attribute by attribute; it spends most of its time on empty hooks."""
    special = ("__new__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    return all(getattr(type(module), s, None) is getattr(nn.Module, s, None) for s in special)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in (bool, int, float, str, type(None)):
        return value
    return kind() if kind in (OrderedDict, dict, set, list) and not value else deepcopy(value, memo)


def _like(mode: FakeTensorMode, x: torch.Tensor, dtype: torch.dtype) -> Any:
    """A fake tensor, made without dispatching an op for it."""
    device = torch.device("cpu") if x.is_meta else x.device
    return FakeTensor(mode, torch.empty(x.shape, dtype=dtype, device="meta"), device)


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The fake mode of a blueprint; None for a model with real tensors."""
    for x in (*model.parameters(), *model.buffers()):
        if isinstance(x, FakeTensor):
            return x.fake_mode
    return None
