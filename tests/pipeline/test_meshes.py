"""Stages with tensor parallelism, data parallelism, ZeRO and recomputation, on four gloo processes."""

import pytest

from tests.pipeline.play import plain, same, trained
from tests.ranks import Ranks


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero(ranks: Ranks, zero: int, schedule: str) -> None:
    strategy = f"microbatches=4,zero={zero},schedule={schedule}"
    for got in ranks.run(4, trained, "tied", "pp=2,dp=2", strategy, timeout=120.0):
        same(got, plain("tied"))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("name", ["tied", "translator", "spread"])
def test_tensor_parallel(ranks: Ranks, name: str, schedule: str) -> None:
    for got in ranks.run(4, trained, name, "pp=2,tp=2", f"microbatches=4,schedule={schedule}", timeout=120.0):
        same(got, plain(name))


@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "tp=2,pp=2"])
def test_any_order_of_axes(ranks: Ranks, mesh: str) -> None:
    for got in ranks.run(4, trained, "skips", mesh, "microbatches=2", timeout=120.0):
        same(got, plain("skips"))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recompute(ranks: Ranks, policy: str) -> None:
    strategy = f"microbatches=4,zero=3,recompute={policy}"
    for got in ranks.run(4, trained, "translator", "pp=2,dp=2", strategy, timeout=120.0):
        same(got, plain("translator"))


def test_compiled(ranks: Ranks) -> None:
    for got in ranks.run(2, trained, "tied", "pp=2", "microbatches=4", True, timeout=120.0):
        same(got, plain("tied"))


def test_sequence_parallel(ranks: Ranks) -> None:
    strategy = "microbatches=4,sequence_parallel=true"
    for got in ranks.run(4, trained, "tied", "pp=2,tp=2", strategy, timeout=120.0):
        same(got, plain("tied"))
