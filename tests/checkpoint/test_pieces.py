"""Every element of a parameter is written once, and from where it lies, data ranks sharing it out or not."""

from typing import Any

import pytest
import torch

from autopar.checkpoint.pieces import Stored, stored
from autopar.emit.params import Place, held_of, local_of, wrap
from autopar.ir.layout import I, Layout, Piece, R, Shard, Type, piece, plain_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Chunk, Param, Spec
from autopar.runtime.simulate import device_mesh, run_ranks

MESH, SUB = Mesh.parse("dp=2,tp=2"), Mesh.parse("dp=2,tp=4").split("tp", 2)
FUSED = tuple(piece(n, n, 1, 2, (-(-n // 2), n // 2)) for n in (5, 3, 3))
CASES: dict[str, tuple[Mesh, tuple[int, ...], dict[str, Type], int]] = {
    "whole": (MESH, (5, 4), {"tp": I}, 0),
    "rows": (MESH, (7, 4), {"tp": plain_shard(0, 7, 2)}, 0),  # type: ignore[dict-item]
    "rows by columns": (MESH, (6, 5), {"tp": plain_shard(0, 6, 2)}, 1),  # type: ignore[dict-item]
    "columns": (MESH, (3, 5), {"tp": plain_shard(1, 5, 2)}, 0),  # type: ignore[dict-item]
    "a rank without rows": (MESH, (2, 3), {"tp": plain_shard(0, 2, 2)}, 0),  # type: ignore[dict-item]
    "fused": (MESH, (11, 3), {"tp": Shard(0, FUSED)}, 0),
    "fused columns": (MESH, (3, 11), {"tp": Shard(1, FUSED)}, 1),
    "interleaved": (MESH, (12, 2), {"tp": Shard(0, (piece(12, 2, 3, 2),))}, 0),
    "two axes": (SUB, (16, 3), {"tp0": Shard(0, (Piece(16, 2, 4),)), "tp1": Shard(0, (Piece(16, 2, 8),))}, 0),
}


def on_ranks(case: str, sharded: bool, body: Any) -> list[Any]:
    mesh, shape, types, dim = CASES[case]
    layout = Layout.of({a: R if a == "dp" else types.get(a, I) for a in mesh.names})
    chunk = Chunk(dim, 2) if sharded else None
    param = Param("w", Spec(shape, torch.float64), "parameter", layout=layout, chunk=chunk)
    whole = torch.arange(param.spec.bytes // 8, dtype=torch.float64).reshape(shape) + 1

    def rank(_: int) -> Any:
        place = Place.of(mesh, device_mesh(mesh))
        return body(wrap(local_of(whole, param, mesh, place.at), param, place), param, place)

    return [whole, *run_ranks(mesh, rank, timeout=60.0)]


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("case", CASES)
def test_each_element_is_written_once_and_where_it_belongs(case: str, sharded: bool) -> None:
    whole, *parts = on_ranks(case, sharded, lambda x, p, place: stored(x, held_of(p, place.mesh), place, "w"))
    seen = torch.zeros_like(whole)
    for part in parts:
        assert isinstance(part, Stored) and part.shape == tuple(whole.shape)
        for box in part.boxes:
            index = tuple(slice(a, a + n) for a, n in zip(box.start, box.sizes))
            torch.testing.assert_close(box.of_local(part.local), whole[index], rtol=0, atol=0)
            seen[index] += part.owned
    assert torch.equal(seen, torch.ones_like(whole))


def test_copies_are_spread_over_the_ranks() -> None:
    def body(x: torch.Tensor, param: Param, place: Place) -> int:
        return sum(stored(x, held_of(param, place.mesh), place, f"w{i}").owned for i in range(64))

    _, *counts = on_ranks("whole", False, body)
    assert sum(counts) == 64 and min(counts) > 4
