"""Parameters whose shard is no DTensor placement: fused, interleaved, irregular and twice shared out rows.

Stored row-permuted, each rank's part whole, under the placement ``Shard(dim)``, so that ``fully_shard``, optimizers and
norms work as on any DTensor. Whatever depends on the order of rows is overridden here or refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.emit.rows import Box, Held, boxes, cut, gather
from autopar.errors import AutoparError
from autopar.runtime.axis import Axis

_KEEPS_ORDER = {"zeros_like", "ones_like", "empty_like", "full_like", "detach", "clone", "alias", "_to_copy", "copy_"}
_KEEPS_ORDER |= {"zero_", "fill_"}
_REDUCES_ALL = {"linalg_vector_norm", "norm", "sum", "any", "all", "max", "min", "equal", "_local_scalar_dense"}


class SegmentedDTensor(DTensor):
    """A DTensor whose ranks hold the rows that its ``held`` says, instead of the runs that its placements say."""

    held: Held
    axes: Mapping[str, Axis]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        like = _like(func, name, args, kwargs or {})
        out = DTensor.__torch_dispatch__(func, types, args, kwargs or {})
        if isinstance(out, (list, tuple)):
            for value, source in zip(out, like * len(out) if len(like) == 1 else like):
                _adopt(value, source)
            return out
        return _adopt(out, next((s for s in like if s is not None), None))

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, rows in their original order. Collective; differentiable, as ``DTensor.full_tensor``."""
        return cast(Tensor, _Full.apply(self))

    def redistribute(self, *args: Any, **kwargs: Any) -> "DTensor":
        """Refused: no placement says where the rows are."""
        raise _refusal("redistribute", self)

    @property
    def _here(self) -> dict[str, int]:
        return {a: self.axes[a].coordinate for a in self.held.mesh.names}

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.held.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.sizes)) for b in boxes(self.held, self._here)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        found: list[Box] = [b for b in boxes(self.held, self._here) if b.start == tuple(index.offset)]
        assert found, (index, self.held)
        return found[0].of_local(self._local_tensor.detach())


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: SegmentedDTensor) -> Tensor:
        ctx.held, ctx.axes, ctx.spec, ctx.here = x.held, x.axes, x._spec, x._here
        return gather(x._local_tensor, x.held, x.axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        local = cut(grad, ctx.held, ctx.here)
        return segmented(DTensor(local, ctx.spec, requires_grad=False), ctx.held, ctx.axes)


def segmented(x: DTensor, held: Held, axes: Mapping[str, Axis]) -> SegmentedDTensor:
    """The same DTensor object, from now on of the class that knows its rows."""
    x.__class__ = SegmentedDTensor
    out = cast(SegmentedDTensor, x)
    out.held, out.axes = held, axes
    return out


def _adopt(out: Any, source: SegmentedDTensor | None) -> Any:
    if source is None or type(out) is not DTensor:
        return out
    same = out.shape == source.shape and out.placements == source.placements
    return segmented(out, source.held, source.axes) if same else out


def _like(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[SegmentedDTensor | None]:
    """Whose rows the results have: one for each tensor of a list op, else one. Refuses what needs the order."""
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        given = (*args, *kwargs.values())
        lists = [a for a in given if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        whole = [a for a in given if isinstance(a, Tensor)]
        return [_agree(name, [*(a[i] for a in lists), *whole]) for i in range(len(lists[0]))]
    tensors = list(_tensors((*args, *kwargs.values())))
    reduces = name in _REDUCES_ALL and not any(isinstance(a, (list, tuple)) and a for a in args)
    if torch.Tag.pointwise in func.tags or name in _KEEPS_ORDER or (reduces and not _has_dim(func, args, kwargs)):
        return [_agree(name, tensors)]
    raise _refusal(name, next(t for t in tensors if isinstance(t, SegmentedDTensor)))


def _has_dim(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    return given.get("dim") not in (None, [])


def _tensors(values: Any) -> Iterator[Tensor]:
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from _tensors(v)


def _agree(name: str, tensors: Sequence[Tensor]) -> SegmentedDTensor | None:
    mine = [t for t in tensors if isinstance(t, SegmentedDTensor)]
    if not mine:
        return None
    for t in tensors:
        if t.dim() > 0 and (not isinstance(t, SegmentedDTensor) or t.held != mine[0].held):
            raise _refusal(name, mine[0])
    return mine[0]


def _refusal(op: str, x: SegmentedDTensor) -> AutoparError:
    why = (
        f"{x.held.name}: {op} needs rows in the order of DTensor's placements, and they lie in another one: the "
        "parameter is fused, interleaved or in uneven runs, or tp and the data axes (zero) share out the same dim"
    )
    fix = (
        "pm.full_state_dict() or full_tensor() for whole values; an elementwise optimizer, as AdamW; or zero=0, where "
        "nothing is fused"
    )
    return AutoparError("segmented-op", why, fix)


def keep_class(p: DTensor, held: Held, axes: Mapping[str, Axis]) -> None:
    """Make ``p`` segmented, and from now on its ``.grad`` as well."""
    segmented(p, held, axes)

    def on_grad(param: Tensor) -> None:
        if type(param.grad) is DTensor:
            segmented(param.grad, held, axes)

    wanted = p.requires_grad
    p.requires_grad_(True).register_post_accumulate_grad_hook(on_grad)
    p.requires_grad_(wanted)
