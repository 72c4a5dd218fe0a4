"""Parameters and buffers of the emitted module: this rank's shards, as DTensors under the model's names."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autopar.emit.initial import materialise
from autopar.emit.rows import Box, Held, boxes, cut, gather, rows
from autopar.emit.segmented import keep_class, segmented
from autopar.errors import AutoparError
from autopar.ir.layout import Shard, chunk_sizes
from autopar.ir.mesh import Mesh
from autopar.ir.program import Param
from autopar.runtime.axis import Axis, axes_of, device_mesh_of

__all__ = ["Place", "gather_of", "held_of", "initialise", "local_of", "restore_class", "rows", "shard_of", "wrap"]


@dataclass(frozen=True)
class Place:
    """Where a rank is: the mesh, its handles and, where there are several ranks, the DeviceMesh with the same axes."""

    mesh: Mesh
    axes: Mapping[str, Axis]
    over: DeviceMesh | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _made: dict[Any, DeviceMesh] = field(default_factory=dict, compare=False, repr=False)
    _kinds: dict[Any, "_Kind"] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(mesh: Mesh, over: DeviceMesh | str) -> "Place":
        """This rank's place. Collective where groups must be made. Raises AutoparError ``bad-mesh``."""
        ready = isinstance(over, DeviceMesh) and over.mesh_dim_names == mesh.names
        split = over if ready else device_mesh_of(mesh, over)
        assert isinstance(split, DeviceMesh)
        kind = split.device_type
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
        return Place(mesh, axes_of(mesh, split), split, device)

    @staticmethod
    def alone(mesh: Mesh, device: str = "cpu") -> "Place":
        """The place of the one rank of a mesh of size 1, without process groups."""
        assert mesh.world == 1
        return Place(mesh, {a: Axis(a, 1, 0, "") for a in mesh.names}, None, torch.device(device))

    @property
    def at(self) -> dict[str, int]:
        """The rank's coordinates."""
        return {a: self.axes[a].coordinate for a in self.mesh.names}

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes with several ranks over which the engine sums gradients."""
        return tuple(a for a in self.mesh.summed_axes if self.mesh.size(a) > 1)

    def own_axes(self, param: Param) -> tuple[str, ...]:
        """The axes with several ranks that a parameter is laid out on by the program, stages excepted."""
        summed = param.summed_over(self.mesh)
        names = (a for a in self.mesh.names if a not in summed and self.mesh.base(a) != "pp")
        return tuple(a for a in names if self.mesh.size(a) > 1)

    def submesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The DeviceMesh of some axes."""
        assert self.over is not None
        if axes not in self._made:  # torch makes it anew each time, which takes longer than all else of a parameter
            self._made[axes] = self.over[axes]
        return self._made[axes]

    def data_mesh(self, axes: tuple[str, ...], ways: int | None = None) -> DeviceMesh:
        """Axes that gradients are summed over as one dim, or as copies and shards where few ranks share out.

        Args:
            ways: ranks along the axes that share out a parameter; None where none do.
        """
        if (axes, ways) not in self._made:
            mesh = self.submesh(axes)
            flat = mesh if mesh.ndim == 1 else mesh._flatten("_".join(axes))
            if ways is not None and ways < flat.size():
                assert flat.mesh_dim_names is not None
                name = flat.mesh_dim_names[0]
                parts = (f"{name}_copies", f"{name}_shards")
                flat = flat._unflatten(name, (flat.size() // ways, ways), parts)
            self._made[axes, ways] = flat
        return self._made[axes, ways]

    def whole_mesh(self, param: Param, ways: int | None = None) -> DeviceMesh:
        """``data_mesh`` of the axes that the parameter's gradient is summed over, followed by its own axes."""
        summed, own = param.summed_over(self.mesh), self.own_axes(param)
        key = (summed, own, ways)
        if key not in self._made:
            parts = [self.data_mesh(summed, ways)] if summed else []
            parts += [self.submesh(own)] if own else []
            self._made[key] = parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)
        return self._made[key]


def held_of(param: Param, mesh: Mesh) -> Held:
    """How the parameter is spread; it must have a layout."""
    assert param.layout is not None, param.name
    return Held(param.spec.shape, param.layout, mesh, param.chunk, param.order, param.name)


def local_of(whole: Tensor, param: Param, mesh: Mesh, at: Mapping[str, int]) -> Tensor:
    """The rank's part of a whole parameter, copied. Raises AutoparError ``param-shape`` where shapes differ."""
    if tuple(whole.shape) != param.spec.shape:
        raise AutoparError("param-shape", f"{param.name}: shape {tuple(whole.shape)}, expected {param.spec.shape}")
    return cut(whole, held_of(param, mesh), at)


def placements_of(param: Param, place: Place) -> tuple[Placement, ...]:
    """DTensor's placements over the parameter's own axes. Where they cannot say the rows, the class does."""
    assert param.layout is not None
    types = (param.layout.get(a) for a in place.own_axes(param))
    return tuple(ShardPlacement(t.dim) if isinstance(t, Shard) else Replicate() for t in types)


def spread_over(param: Param, place: Place, ways: int | None = None) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of a parameter over all axes; ``ways`` as in ``Place.data_mesh``."""
    mesh, own = place.whole_mesh(param, ways), placements_of(param, place)
    data: list[Placement] = [Replicate()] * (mesh.ndim - len(own))
    if param.chunk is not None:
        data[-1] = ShardPlacement(param.chunk.dim)
    return mesh, (*data, *own)


@lru_cache(maxsize=4096)
def is_plain(held: Held, axes: tuple[str, ...]) -> bool:
    """Whether DTensor's own placements over ``axes`` say which rows each rank holds, on every rank."""
    home = dict.fromkeys(held.mesh.names, 0)
    points = _points(held.mesh, (*axes, *held.sharing))
    return all(boxes(held, home | at) == _placed(held, axes, home | at) for at in points)


def _points(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    for i in range(math.prod(mesh.size(a) for a in axes)):
        at = {}
        for a in reversed(axes):
            at[a], i = i % mesh.size(a), i // mesh.size(a)
        yield at


def _placed(held: Held, axes: tuple[str, ...], at: Mapping[str, int]) -> tuple[Box, ...]:
    """The box that DTensor expects: each axis in turn cuts as ``torch.chunk``."""
    start, sizes = [0] * len(held.shape), list(held.shape)
    cuts = []
    if held.chunk:
        mine = held.mesh.place(held.sharing, at) % held.chunk.ways
        cuts = [(held.chunk.dim, held.chunk.ways, mine)]
    kinds = ((held.layout.get(a), a) for a in axes)
    cuts += [(kind.dim, held.mesh.size(a), at[a]) for kind, a in kinds if isinstance(kind, Shard)]
    for dim, ways, mine in cuts:
        shares = chunk_sizes(sizes[dim], ways)
        start[dim] += sum(shares[:mine])
        sizes[dim] = shares[mine]
    return (Box(tuple(start), tuple(sizes), (0,) * len(start)),) if 0 not in sizes else ()


@dataclass(frozen=True)
class _Kind:
    """What equal parameters of equal layers have in common.

    Args:
        shape: of the rank's part.
        spec: over which mesh, and how, a DTensor of it lies; None where it is none.
        plain: whether the placements say which rows each rank holds.
    """

    shape: tuple[int, ...]
    spec: DTensorSpec | None
    plain: bool


def _kind(param: Param, place: Place) -> _Kind:
    key = (param.kind, param.spec, param.layout, param.chunk, param.order)
    if key not in place._kinds:
        held, own = held_of(param, place.mesh), place.own_axes(param)
        is_parameter, over = param.kind == "parameter", None
        if is_parameter and place.summed_axes:
            over = spread_over(param, place, param.chunk.ways if param.chunk else None)
        elif own and (is_parameter or held.shards):
            over = place.submesh(own), placements_of(param, place)
        spec = None if over is None else _spec(param, param.spec.dtype, *over)
        place._kinds[key] = _Kind(held.local_shape(place.at), spec, spec is None or is_plain(held, own))
    return place._kinds[key]


def wrap(local: Tensor, param: Param, place: Place) -> Tensor:
    """The rank's part as what the module registers: an nn.Parameter, or a buffer.

    A parameter is a DTensor on the data axes and its own, of class SegmentedDTensor where placements cannot say its
    rows; a sharded buffer is one on its own. Without such axes, and for other buffers, it is a plain tensor.
    """
    return _wrapped(local, param, place, _kind(param, place))


def _wrapped(local: Tensor, param: Param, place: Place, kind: _Kind) -> Tensor:
    if kind.spec is None:
        return nn.Parameter(local, requires_grad=param.trainable) if param.kind == "parameter" else local
    same = local.dtype == param.spec.dtype
    out = _dtensor(local, param, kind.spec if same else _spec(param, local.dtype, kind.spec.mesh, kind.spec.placements))
    if not kind.plain:
        restore_class(out, param, place)
    return out


def on_mesh(local: Tensor, param: Param, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """A rank's part as a DTensor; a parameter where it is one."""
    return _dtensor(local, param, _spec(param, local.dtype, mesh, placements))


def _spec(param: Param, dtype: torch.dtype, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorSpec:
    strides = torch.empty(param.spec.shape, dtype=dtype, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(param.spec.shape), strides, dtype))


def _dtensor(local: Tensor, param: Param, spec: DTensorSpec) -> Tensor:
    is_parameter = param.kind == "parameter"
    out: Tensor = DTensor(local, spec, requires_grad=is_parameter and param.trainable)
    if is_parameter:  # as ``nn.Parameter`` makes one of a DTensor, less a detour through its dispatch
        out._is_param = True
    return out


def restore_class(x: Tensor, param: Param, place: Place) -> None:
    """Give a DTensor of a parameter with segmented rows its class, after an engine made it anew."""
    held = held_of(param, place.mesh)
    if isinstance(x, DTensor) and not is_plain(held, place.own_axes(param)):
        if isinstance(x, nn.Parameter) and param.spec.is_float:
            keep_class(x, held, place.axes)
        else:
            segmented(x, held, place.axes)


def shard_of(x: Tensor) -> Tensor:
    """This rank's part of a parameter, buffer or gradient, sharing memory and outside autograd."""
    return x._local_tensor if isinstance(x, DTensor) else x.detach()


def gather_of(x: Tensor, param: Param, place: Place) -> Tensor:
    """The whole tensor of a parameter, its gradient, or a buffer. Collective over the axes that shard it."""
    return gather(shard_of(x), held_of(param, place.mesh), place.axes)


def initialise(
    model: nn.Module,
    params: Mapping[str, Param],
    place: Place,
    values: Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """What the emitted module registers, by first original name; the model is only read.

    Real weights are cut shard by shard. Weights on the meta device are made by the model's own initialisers, one
    module at a time, from a stream that depends on the module's path and ``seed`` only: equal on every mesh.

    Args:
        values: tensors of names that the model does not have (constants).
        device: where to put the shards, by default the place's; ``meta`` allocates nothing.

    Raises:
        AutoparError: ``meta-initialiser`` or ``meta-buffer`` where a module cannot make its own tensors.
    """
    target = device or place.device
    local: dict[str, Tensor] = {}
    kinds = {name: _kind(param, place) for name, param in params.items()}
    if target.type == "meta":
        empty = lru_cache(lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
        for name, param in params.items():
            local[name] = empty(kinds[name].shape, param.spec.dtype).detach()  # holds nothing that is shared
    else:
        table: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        table |= dict(model.named_buffers(remove_duplicate=False))
        table |= dict(values or {})
        for name, whole in _wholes(model, params, table, seed):
            local[name] = local_of(whole, params[name], place.mesh, place.at).to(target)
    return {name: _wrapped(local[name], param, place, kinds[name]) for name, param in params.items()}


def _wholes(
    model: nn.Module, params: Mapping[str, Param], table: Mapping[str, Tensor], seed: int
) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, table[name]) for name in params if not table[name].is_meta)
    yield from materialise(model, {name for name in params if table[name].is_meta}, seed)
