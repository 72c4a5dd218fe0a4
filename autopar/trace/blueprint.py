"""A copy of a model that can be traced but holds no weights."""

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.ir.modules import once
from autopar.trace.layers import plain_attributes
from autopar.trace.state import INTERNAL, tensors_in

_ATOMS = frozenset((bool, int, float, str, type(None)))
_CONTAINERS = frozenset((OrderedDict, dict, set, list))


def blueprint(model: nn.Module, lower: torch.dtype | None = None) -> nn.Module:
    """The model with fake parameters and buffers: shapes, dtypes and devices, no storage. Meta becomes the CPU.

    Args:
        lower: dtype that parameters in float32 get instead; buffers keep theirs.

    Unlike on the meta device, code that makes tensors on the default device, or constants, traces as it would for real.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    memo: dict[int, Any] = {}
    modules = once(model)
    for p in (p for m in modules for p in m._parameters.values()):
        if p is None or id(p) in memo:
            continue
        dtype = lower if lower is not None and p.dtype == torch.float32 else p.dtype
        like = memo[id(p)] = _like(mode, p, dtype).requires_grad_(p.requires_grad)
        like._is_param = True
        if p._backward_hooks:
            like._backward_hooks = p._backward_hooks  # to be refused
    for b in (b for m in modules for b in m._buffers.values()):
        if b is not None and id(b) not in memo:
            memo[id(b)] = _like(mode, b, b.dtype)
    keep_computed(modules, memo)
    usual = {kind: _usual(kind) for kind in {type(m) for m in modules}}
    for module in modules:
        if usual[type(module)]:
            memo[id(module)] = module.__new__(type(module))
    for module in modules:
        if usual[type(module)]:
            _copy_attributes(module.__dict__, memo[id(module)].__dict__, memo)
    return deepcopy(model, memo)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that was run."""
    memo: dict[int, Any] = {}
    keep_computed(once(model), memo)
    return deepcopy(model, memo)


def keep_computed(modules: Iterable[nn.Module], memo: dict[int, Any]) -> None:
    """Give ``deepcopy`` values for what it refuses: tensors that a forward left in attributes with a graph."""
    seen: set[int] = set()  # ids of values that several modules have, a configuration
    for module in modules:
        for name, value in plain_attributes(module):
            if name in INTERNAL or type(value) in _ATOMS or id(value) in seen:
                continue
            seen.add(id(value))
            for x in tensors_in(value):
                if not x.is_leaf:
                    memo.setdefault(id(x), x.detach().clone())


def _usual(kind: type[nn.Module]) -> bool:
    """Whether ``deepcopy`` would copy these attribute by attribute; it spends most of its time on empty hooks."""
    special = ("__new__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    return all(getattr(kind, s, None) is getattr(nn.Module, s, None) for s in special)


def _copy_attributes(old: dict[str, Any], new: dict[str, Any], memo: dict[int, Any]) -> None:
    for name, value in old.items():
        kind = type(value)
        if kind in _ATOMS:
            new[name] = value
        elif kind in _CONTAINERS and not value:
            new[name] = kind()
        else:
            new[name] = deepcopy(value, memo)


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
