"""Awkward models in stages, on gloo processes, against the unsharded ones in double precision."""

import pytest

import autopar
from tests.pipeline.models import batch, model
from tests.pipeline.play import plain, same, trained
from tests.ranks import Ranks

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]


@pytest.mark.parametrize("name", ["scores", "skips", "translator"])
def test_four_stages(ranks: Ranks, name: str) -> None:
    for got in ranks.run(4, trained, name, "pp=4", "microbatches=4", timeout=120.0):
        same(got, plain(name))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["spread", "tied"])
def test_every_schedule(ranks: Ranks, name: str, schedule: str) -> None:
    for got in ranks.run(2, trained, name, "pp=2", f"microbatches=8,schedule={schedule}", timeout=120.0):
        same(got, plain(name))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("name", ["frozen", "translator"])
def test_parts_that_learn_nothing_or_are_fused(ranks: Ranks, name: str, schedule: str) -> None:
    for got in ranks.run(2, trained, name, "pp=2", f"microbatches=4,schedule={schedule}", timeout=120.0):
        same(got, plain(name))


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("spread", "pp=2,dp=2,tp=2", "zero=3"),
        ("translator", "pp=4,tp=2", "sequence_parallel=true"),
        ("skips", "pp=4,dp=2", "virtual_stages=1"),
    ],
)
def test_eight_simulated_ranks(name: str, mesh: str, strategy: str) -> None:
    report = autopar.verify(model(name), mesh, (), batch(name), strategy=strategy)
    assert report.ok, str(report)
