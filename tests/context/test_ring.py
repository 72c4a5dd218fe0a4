"""Ring attention equals the unsharded attention, sends what it says, and shares the work of a causal mask out."""

from collections import Counter

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.runtime import ring
from autopar.runtime.axis import Axis, axes_of
from autopar.runtime.simulate import device_mesh, run_ranks
from autopar.runtime.tiles import Band, tiles
from tests.context.sequences import KINDS, Case, runs
from tests.ranks import Ranks

TOLERANCE = 1e-12


def axis_of(ways: int) -> Axis:
    mesh = Mesh.of({"cp": ways})
    return axes_of(mesh, device_mesh(mesh))["cp"]


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_equals_the_unsharded_attention(kind: int) -> None:
    """20 random shapes of each mask kind, in both orders, even and uneven."""
    for seed in range(kind, 20 * len(KINDS), len(KINDS)):
        case = Case.random(seed)
        error = case.error(run_ranks(case.ways, lambda rank, case=case: case.part(axis_of(case.ways))))
        assert error < TOLERANCE, (seed, error, case.q.shape, case.k.shape, case.queries)


def test_the_comparison_sees_a_block_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.random(KINDS.index("causal") + len(KINDS) * 2)
    monkeypatch.setattr(Band, "covers", lambda self, query, key: False if query[0] > key[0] else None)
    assert case.ways > 1
    assert case.error(run_ranks(case.ways, lambda rank: case.part(axis_of(case.ways)))) > 1e-3


def in_process(seed: int) -> list[torch.Tensor]:
    case = Case.random(seed)
    return case.part(axis_of(case.ways))


@pytest.mark.parametrize("kind", ["causal", "padding", "added", "written", "numbers", "sink"])
def test_on_gloo_processes(ranks: Ranks, kind: str) -> None:
    seeds = [s for s in range(KINDS.index(kind), 20 * len(KINDS), len(KINDS)) if Case.random(s).ways == 4]
    case = Case.random(seeds[0])
    found = [answer.value for answer in ranks.answers(4, in_process, seeds[0])]
    assert case.error(found) < TOLERANCE


@pytest.mark.parametrize("ways", [2, 4])
def test_bytes_on_the_wire(monkeypatch: pytest.MonkeyPatch, ways: int) -> None:
    """2(N-1)/N of the keys' bytes forward (values are as many), as much again backward, and their gradients as far."""
    length, real, count = 16 * ways, ring.departed, Counter[int]()
    q, k, v, grad = (torch.randn(1, n, length, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    held = runs(length, ways, True)
    case = Case(ways, q, k, v, grad, held, held, causal=True)

    def counted(x: torch.Tensor, axis: Axis, receive: list[int], send: list[int]) -> torch.Tensor:
        count[axis.coordinate] += sum(send) * x.element_size()
        assert send[(axis.coordinate + 1) % ways] == sum(send)
        return real(x, axis, receive, send)

    monkeypatch.setattr(ring, "departed", counted)
    run_ranks(ways, lambda rank: case.part(axis_of(ways)))
    forward = 2 * (ways - 1) * k.nbytes // ways
    assert set(count) == set(range(ways)) and set(count.values()) == {3 * forward}


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_zigzag_shares_out_a_causal_mask(ways: int) -> None:
    """Within 2% of the mean; contiguous runs leave the last rank (2N-1)/N of it."""
    length = 128 * ways

    def work(zigzag: bool) -> list[float]:
        held = runs(length, ways, zigzag)
        out = []
        for mine in held:
            found = (t for keys in held for t in tiles(mine, keys, Band.of(True)))
            out.append(sum(t.query[1] * t.key[1] * (0.5 if t.diagonal else 1.0) for t in found))
        return out

    balanced, contiguous = work(True), work(False)
    mean = sum(balanced) / ways
    assert max(abs(w - mean) for w in balanced) / mean < 0.02
    assert sum(contiguous) == sum(balanced)
    assert max(contiguous) / mean == pytest.approx((2 * ways - 1) / ways, rel=0.02)


def test_blocks_that_a_mask_empties_are_not_computed() -> None:
    held = runs(64, 4, False)
    assert [len(list(tiles(held[0], keys, Band.of(True)))) for keys in held] == [1, 0, 0, 0]
    window = Band.of(True, 4)
    assert [len(list(tiles(held[3], keys, window))) for keys in held] == [0, 0, 1, 1]
