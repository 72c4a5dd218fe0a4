"""Fields that the user writes behind ``auto`` are those of what is chosen, or refused."""

import pytest
import torch

from autopar.auto import decide
from autopar.cost.forms import Forms
from autopar.cost.hardware import load
from autopar.cost.regime import Regime
from autopar.cost.search import search
from autopar.cost.space import Space
from autopar.errors import AutoparError
from autopar.families import families
from autopar.ir.mesh import Mesh
from autopar.planner import plan
from autopar.strategy import Strategy, written
from tests.llama import llama

RANKS, ROWS, LENGTH = 4, 8, 16


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    return {"input_ids": ids, "labels": torch.zeros_like(ids)}


@pytest.mark.parametrize(
    "text",
    [
        "zero=0,recompute=none",
        "zero=2,zero_shard_size=2",
        "zero_shard_size=4,sequence_parallel=false",
        "offload=cpu,prefetch=2",
        "schedule=gpipe,microbatches=4",
        "schedule=1f1b,outputs=last",
        "microbatch_rows=1,strict=true",
        "virtual_stages=1",
    ],
)
def test_what_is_written_is_what_runs(text: str) -> None:
    found = decide(llama(layers=4), RANKS, (), batch(), f"auto,{text}", rows=ROWS)
    strategy, own = Strategy.of(found.strategy), written(text)
    assert {name: getattr(strategy, name) for name in own} == own
    if {"schedule", "virtual_stages"} & own.keys():
        assert Mesh.parse(found.mesh).size("pp") > 1
    if "microbatch_rows" in own:
        assert strategy.microbatches is None


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("stages=layers.1", "bad-strategy"),
        ("passes=data-parallel", "bad-strategy"),
        ("zero=7", "bad-strategy"),
        ("offload=cpu,zero=0", "bad-strategy"),
        ("zero=1,zero=2", "bad-strategy"),
        ("schedule=dualpipev", "bad-strategy"),
        ("context_parallel=ring:2+ulysses:2", "bad-strategy"),
        ("microbatches=3", "nothing-fits"),
    ],
)
def test_what_no_plan_can_have_is_refused(text: str, slug: str) -> None:
    with pytest.raises(AutoparError) as error:
        decide(llama(layers=4), RANKS, (), batch(), f"auto,{text}", rows=ROWS)
    assert error.value.slug == slug
    assert slug != "nothing-fits" or text in error.value.message


def test_a_plan_says_what_was_decided_and_refuses_to_be_told_twice() -> None:
    model = llama(layers=4).to("meta")
    found = plan(model, "h100x4", (), batch(), strategy="strict=true,expert_chunks=2,precision=fp32,zero=0")
    assert all("strict=True,expert_chunks=2" in p.strategy and p.option.zero == 0 for p in found)
    for text in ("precision=fp32", "hardware=a100-80g"):
        with pytest.raises(AutoparError) as error:
            plan(model, "h100x4", (), batch(), precision="bf16", strategy=text)
        assert error.value.slug == "bad-strategy"


def test_states_that_are_to_stay_on_the_device_are_not_offloaded() -> None:
    model, machine = llama(layers=4).to("meta"), load("h100x2")
    forms = [Forms(f) for f in families(model, (), batch(), hardware=machine).values()]
    for given, offloads in (((), {False, True}), ((("offload", "none"),), {False})):
        found = search(forms, machine, Space(2, 8, 4, LENGTH, given=given), Regime(reserve=1e12), 1e9)
        assert not found.ranked and {o.offload for o in found.least} == offloads
