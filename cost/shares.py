"""Local sizes: what one rank holds of a value, as numbers or as expressions of the axis sizes."""

from collections.abc import Mapping

from torch import fx

from autopar.cost.compute import Shapes, Value
from autopar.cost.symbols import Number, is_symbolic, ratio
from autopar.errors import AutoparError
from autopar.ir.layout import Layout, Shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Program, Spec, specs

Sizes = Mapping[str, Number]
"""Number of ranks along each axis; absent axes have one."""


def mesh_sizes(mesh: Mesh) -> dict[str, Number]:
    """The sizes of a mesh's axes, sub-axes included."""
    return {axis: mesh.size(axis) for axis in mesh.names}


def local_value(spec: Spec, layout: Layout, sizes: Sizes) -> Value:
    """``spec`` as the rank that holds most of it sees it. Symbolic sizes are taken to divide."""
    shape: list[Number] = list(spec.shape)
    for axis, shard in layout.shards():
        shape[shard.dim] = _share(shape[shard.dim], shard, sizes.get(axis, 1))
    return Value(tuple(shape), spec.dtype)


def _share(length: Number, shard: Shard, ways: Number) -> Number:
    if shard.even or is_symbolic(ways):
        return ratio(length, ways)
    return ratio(length * max(_held(shard, c, int(ways)) for c in range(int(ways))), shard.length)


def _held(shard: Shard, coordinate: int, ways: int) -> int:
    """Elements of the dim that the coordinate holds, were it sharded by nothing else."""
    return sum(p.length // p.count * p.share(coordinate, ways) for p in shard.pieces)


def layouts(node: fx.Node) -> tuple[Layout, ...]:
    """The layout of each of the node's values; whole ones where the program is not sharded."""
    layout = node.meta.get("layout")
    if layout is None:
        return (Layout(),) * len(specs(node))
    return layout if isinstance(layout, tuple) else (layout,)


def local_shapes(sizes: Sizes) -> Shapes:
    """The function from a node to its values on one rank."""

    def shapes(node: fx.Node) -> tuple[Value | None, ...]:
        pairs = zip(specs(node), layouts(node), strict=True)
        return tuple(local_value(s, layout, sizes) if isinstance(s, Spec) else None for s, layout in pairs)

    return shapes


def check_priced(program: Program) -> None:
    """Refuse what has no layouts on a mesh of several ranks, or is already local.

    Raises AutoparError ``unpriced-form`` or ``missing-layout``.
    """
    if program.form is not Form.RESHARDED and not (program.form < Form.RESHARDED and program.mesh.world == 1):
        fix = "run the passes up to reshard, or price on a mesh of one rank"
        raise AutoparError("unpriced-form", f"a program in Form {program.form.name} on mesh {program.mesh}", fix)
    if program.mesh.world == 1:
        return
    for name, graph in program.graphs():
        for node in graph.nodes:
            if "layout" not in node.meta and any(isinstance(s, Spec) for s in specs(node)) and node.op != "output":
                raise AutoparError("missing-layout", f"{name or 'outer graph'}: {node.name} has no layout")
