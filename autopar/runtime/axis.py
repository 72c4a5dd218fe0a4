"""Handles of mesh axes, which emitted functions take as arguments."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class Axis:
    """This rank's view of one mesh axis.

    Args:
        name: the axis, or the sub-axis ("tp0").
        size: ranks along it. Where it is 1 every collective is the identity and nothing is issued.
        coordinate: this rank's place along it.
        group: name of the c10d group of the ranks along it; never read where size is 1.
    """

    name: str
    size: int
    coordinate: int
    group: str


def device_mesh_of(mesh: Mesh, over: DeviceMesh | str) -> DeviceMesh:
    """A DeviceMesh with the dims ``mesh.axes``, sub-axes included.

    Collective over all ranks where groups must be made: every rank calls it.

    Args:
        over: the user's DeviceMesh, whose ranks and groups are kept and whose split dims are unflattened; or a
            device type, to make one over ranks 0 to world - 1.

    Raises:
        AutoparError: ``bad-mesh`` where ``over`` has other axes than ``mesh.user_axes``.
    """
    if isinstance(over, str):
        sizes = tuple(n for _, n in mesh.user_axes)
        over = init_device_mesh(over, sizes, mesh_dim_names=tuple(a for a, _ in mesh.user_axes))
    have = tuple(zip(over.mesh_dim_names or (), over.mesh.shape))
    if have != mesh.user_axes:
        said = ",".join(f"{a}={n}" for a, n in have) or "without names"
        raise AutoparError("bad-mesh", f"DeviceMesh {said} is not the mesh {mesh}", "pass the mesh's own DeviceMesh")
    for name, _ in mesh.user_axes:
        parts = mesh.parts(name)
        if parts != (name,):
            over = over._unflatten(name, tuple(mesh.size(p) for p in parts), parts)
    return over


def axes_of(mesh: Mesh, over: DeviceMesh) -> dict[str, Axis]:
    """A handle for each axis of ``mesh``, sub-axes and the whole axes that they make up.

    Collective over all ranks where ``over`` is the user's DeviceMesh and ``mesh`` has sub-axes.

    Args:
        over: the user's DeviceMesh, or what ``device_mesh_of`` made of it.

    Raises:
        AutoparError: ``bad-mesh`` where ``over`` has other axes than ``mesh``.
    """
    names = tuple(over.mesh_dim_names or ())
    split = over if names == mesh.names else device_mesh_of(mesh, over)
    whole = over._get_root_mesh() if names == mesh.names else over
    axes = {name: _axis(name, split) for name in mesh.names}
    for name, size in mesh.user_axes:
        if name not in axes:
            axes[name] = _axis(name, whole)
        if axes[name].size != size:
            raise AutoparError("bad-mesh", f"DeviceMesh has {name}={axes[name].size}, the mesh {mesh}")
    return axes


def _axis(name: str, over: DeviceMesh) -> Axis:
    size = over.size((over.mesh_dim_names or ()).index(name))
    return Axis(name, size, over.get_local_rank(name), over.get_group(name).group_name)
