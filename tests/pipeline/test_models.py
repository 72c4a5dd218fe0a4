"""Awkward models in stages, on gloo processes, against the unsharded ones in double precision."""

import pytest

from tests.pipeline.models import MODELS
from tests.pipeline.play import plain, same, trained
from tests.ranks import Ranks

EXACT = sorted(set(MODELS) - {"noisy"})


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("ranks_", [2, 4])
def test_equal(ranks: Ranks, name: str, ranks_: int) -> None:
    for got in ranks.run(ranks_, trained, name, f"pp={ranks_}", "microbatches=4", timeout=120.0):
        same(got, plain(name))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("name", EXACT)
def test_every_schedule(ranks: Ranks, name: str, schedule: str) -> None:
    for got in ranks.run(2, trained, name, "pp=2", f"microbatches=8,schedule={schedule}", timeout=120.0):
        same(got, plain(name))
