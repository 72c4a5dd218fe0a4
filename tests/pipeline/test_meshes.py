"""Stages with tensor parallelism, data parallelism, ZeRO and recomputation, on four gloo processes."""

from typing import Any

import pytest
import torch

from tests.pipeline.play import plain, same, trained
from tests.ranks import Ranks


@pytest.mark.parametrize(
    ("zero", "schedule"),
    [(0, "1f1b"), (1, "interleaved"), (2, "1f1b"), (2, "zero-bubble"), (3, "1f1b"), (3, "zero-bubble")],
)
def test_zero(ranks: Ranks, zero: int, schedule: str) -> None:
    strategy = f"microbatches=4,zero={zero},schedule={schedule}"
    for got in ranks.run(4, trained, "tied", "pp=2,dp=2", strategy, timeout=120.0):
        same(got, plain("tied"))


@pytest.mark.parametrize(("name", "schedule"), [("tied", "1f1b"), ("translator", "zbv"), ("spread", "zbv")])
def test_tensor_parallel(ranks: Ranks, name: str, schedule: str) -> None:
    for got in ranks.run(4, trained, name, "pp=2,tp=2", f"microbatches=4,schedule={schedule}", timeout=120.0):
        same(got, plain(name))


@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "tp=2,pp=2"])
def test_any_order_of_axes(ranks: Ranks, mesh: str) -> None:
    for got in ranks.run(4, trained, "skips", mesh, "microbatches=2", timeout=120.0):
        same(got, plain("skips"))


def test_recompute(ranks: Ranks) -> None:
    strategy = "microbatches=4,zero=3,recompute=full"
    for got in ranks.run(4, trained, "translator", "pp=2,dp=2", strategy, timeout=120.0):
        same(got, plain("translator"))


def test_compiled(ranks: Ranks) -> None:
    for got in ranks.run(2, trained, "tied", "pp=2", "microbatches=4", True, timeout=120.0):
        same(got, plain("tied"))


def test_sequence_parallel(ranks: Ranks) -> None:
    strategy = "microbatches=4,sequence_parallel=true"
    for got in ranks.run(4, trained, "tied", "pp=2,tp=2", strategy, timeout=120.0):
        same(got, plain("tied"))


def halved(mesh: str) -> dict[str, Any]:
    return trained("tied", mesh, "microbatches=2,precision=bf16,zero=2", single=True)


def test_half_precision_is_that_without_stages(ranks: Ranks) -> None:
    want = ranks.run(2, halved, "dp=2", timeout=120.0)[0]
    for got in ranks.run(4, halved, "pp=2,dp=2", timeout=120.0):
        for name, tensor in want["grads"].items():
            torch.testing.assert_close(got["grads"][name], tensor, rtol=0.05, atol=1e-3)
