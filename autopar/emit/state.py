"""Loading a state dict into this rank's shards."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.emit.across import Across
from autopar.emit.params import Place, held_of, local_of, shard_of
from autopar.emit.segmented import SegmentedDTensor
from autopar.emit.units import Skeleton
from autopar.errors import AutoparError
from autopar.ir.program import Param

LISTED = 20


def load(skeleton: Skeleton, across: Across, state: Mapping[str, Any], strict: bool) -> Any:
    """Copy ``state`` by original names. A tied parameter may come under any of its names; all that come must be equal.

    What other ranks of a pipeline hold may be there or not.

    Raises:
        AutoparError: ``state-dict-mismatch``, before anything is written; ``meta-parameter`` where shards hold no data.
    """
    place, params = across.place, across.params
    wanted = {name: p for name, p in params.items() if p.kind == "parameter" or (p.kind == "buffer" and p.persistent)}
    names = {alias for name, p in wanted.items() for alias in (name, *p.tied)}
    given = {name: [a for a in (name, *p.tied) if a in state] for name, p in wanted.items()}
    missing = [name for name, found in given.items() if not found and across.holds(wanted[name])]
    unexpected = [name for name in state if name not in names]
    wrong = list(_misshaped(wanted, given, state))
    if wrong or (strict and (missing or unexpected)):
        raise _mismatch(missing if strict else [], unexpected if strict else [], wrong)
    with torch.no_grad():
        for name, found in given.items():
            if found and across.holds(wanted[name]):
                _, table, key = skeleton.tables[name]
                _copy(table[key], state[found[0]], wanted[name], place)
            elif found and isinstance(state[found[0]], DTensor):
                state[found[0]].full_tensor()  # collective with the ranks that hold the parameter
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def _misshaped(wanted: Mapping[str, Param], given: Mapping[str, list[str]], state: Mapping[str, Any]) -> Iterator[str]:
    for name, found in given.items():
        for alias in found:
            value, shape = state[alias], wanted[name].spec.shape
            if not isinstance(value, Tensor):
                yield f"{alias}: a {type(value).__name__}, expected a tensor of shape {list(shape)}"
            elif tuple(value.shape) != shape:
                yield f"{alias}: shape {list(value.shape)}, expected {list(shape)}"
        first = state[found[0]] if found else None
        for alias in found[1:]:
            if not _same(first, state[alias]):
                yield f"{alias}: differs from {found[0]}, to which it is tied"


def _same(a: Any, b: Any) -> bool:
    """Whether tied values agree, each rank comparing what it holds."""
    if a is b or not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
        return True
    a, b = shard_of(a), shard_of(b)
    return a.shape == b.shape and torch.equal(a, b)


def _copy(target: Tensor, value: Tensor, param: Param, place: Place) -> None:
    local = shard_of(target)
    if local.is_meta:
        why = f"{param.name}: the shard is on the meta device and holds no data"
        raise AutoparError("meta-parameter", why, "parallelize with a device that has memory")
    if isinstance(value, SegmentedDTensor) and value.held == held_of(param, place.mesh):
        local.copy_(value._local_tensor)
    elif isinstance(value, DTensor):
        local.copy_(local_of(value.full_tensor(), param, place.mesh, place.at))
    else:
        local.copy_(local_of(value, param, place.mesh, place.at))


def _mismatch(missing: list[str], unexpected: list[str], wrong: list[str]) -> AutoparError:
    parts = []
    for title, names in (("missing", missing), ("unexpected", unexpected), ("misshaped", wrong)):
        if names:
            more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
            parts.append(f"{title}: {', '.join(names[:LISTED])}{more}")
    fix = "pass the unsharded model's state dict, or strict=False to leave out names"
    return AutoparError("state-dict-mismatch", "load_state_dict: " + "; ".join(parts), fix)
