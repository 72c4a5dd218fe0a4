"""Where a rank is while a node is localized, and which runs of a dim it holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.layout import Layout, Shard, local_inner, local_pieces, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.program import Spec
from autopar.ir.runs import runs_of

Handle = Callable[[str], fx.Node]
Segments = tuple[tuple[int, tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Place:
    """Where an op runs: the mesh, this rank's coordinates, the layouts of its inputs and outputs, and axis handles."""

    mesh: Mesh
    at: Mapping[str, int]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    handle: Handle

    def shape(self, spec: Spec, layout: Layout) -> tuple[int, ...]:
        """Local shape of a global spec."""
        return local_shape(spec.shape, layout, self.mesh, self.at)


def segments_of(layout: Layout, axis: str, length: int, mesh: Mesh, at: Mapping[str, int]) -> Segments | None:
    """``segments`` of the runtime collectives for the shard on ``axis``; None where plain and even."""
    out = every_segment(layout, axis, length, mesh, at)
    even = all(len(set(counts)) == 1 for _, counts, _ in out)
    return None if len(out) == 1 and out[0][0] == 1 and even else out


def every_segment(layout: Layout, axis: str, length: int, mesh: Mesh, at: Mapping[str, int]) -> Segments:
    """The segments of a dim that ``axis`` shards: repeats, shares of the coordinates, elements of one index."""
    shard = layout[axis]
    assert isinstance(shard, Shard)
    others = Layout(tuple((a, t) for a, t in layout.types if a != axis))
    whole = local_pieces(others, shard.dim, length, mesh, at)
    if len(whole) != len(shard.pieces):
        whole = tuple(p.length * sum(whole) // length for p in shard.pieces)
    out = []
    for k, p in enumerate(shard.pieces):
        inner = local_inner(layout, axis, k, mesh, at)
        counts = tuple(p.share(c, mesh.size(axis)) for c in range(mesh.size(axis)))
        out.append((whole[k] // (p.count * inner), counts, inner))
    return tuple(out)


def run_start(layout: Layout, dim: int, length: int, mesh: Mesh, at: Mapping[str, int]) -> int:
    """Global index of the first local element of a dim held as one contiguous run."""
    runs = runs_of(layout, dim, length, mesh, at)
    if len(runs) != 1:
        raise AutoparError("scattered-run", f"dim {dim} of {length} is held in several runs", None)
    return runs[0][0]
