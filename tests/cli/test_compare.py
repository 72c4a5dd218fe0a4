"""Strategies that are priced as they are written, and those that are refused."""

import json

import pytest

from autopar.cli.main import main
from autopar.cost.hardware import load
from autopar.errors import AutoparError
from autopar.ranking import space_of


@pytest.mark.parametrize(
    ("strategy", "slug", "words"),
    [
        ("dp=8,zero=5", "bad-strategy", "from 0 to 3"), ("dp=8,zero=yes", "bad-strategy", "from 0 to 3"),
        ("dp=8,offload=cpu", "bad-strategy", "add zero=1"), ("fspd", "bad-mesh", "fsdp, hsdp"),
        ("pp=8,schedule=zbv", "bad-mesh", "at most 4"), ("dp=8,zero=3,zero_shard_size=3", "bad-strategy", "divisor"),
        ("dp=4,cp=2,context_parallel=rings", "bad-strategy", "ring or ulysses"),
        ("pp=2,dp=4,schedule=interleaved,virtual_stages=1", "schedule", "virtual_stages=2"),
    ],
)  # fmt: skip
def test_a_strategy_that_no_run_takes_has_no_price(capsys, strategy, slug, words):
    assert main(["compare", "hf:llama3-8b-tiny", "--cluster", "h100x8", strategy]) == 1
    said = capsys.readouterr().err
    assert f"[{slug}]" in said and words in said


def test_a_misspelled_axis_and_an_empty_batch_are_refused(capsys):
    with pytest.raises(AutoparError) as error:
        space_of(load("h100x8"), 0, 64)
    assert error.value.slug == "indivisible-batch"
    assert main(["plan", "hf:llama3-8b-tiny", "h100x8", "--axes", "dp,pt"]) == 1
    assert "unknown axis 'pt' [bad-mesh]" in capsys.readouterr().err


def test_what_a_strategy_leaves_open_is_what_a_run_chooses(capsys):
    """As many microbatches as divide the rows, up to four a stage; the cheaper kind of context parallelism."""
    asked = ["dp=4,pp=2", "dp=4,cp=2", "dp=4,cp=2,context_parallel=ring", "dp=4,cp=2,context_parallel=ulysses"]
    assert main(["compare", "hf:llama3-8b-tiny", "--cluster", "h100x8", "--batch", "96", "--json", *asked]) == 0
    pipeline, *context = json.loads(capsys.readouterr().out)
    assert pipeline["microbatches"] == 8 and "schedule=1f1b" in pipeline["strategy"]
    assert context[0]["step_seconds"] == min(c["step_seconds"] for c in context)


def test_stages_without_a_schedule_are_priced_as_a_run_would_take_them(capsys):
    """Several to a rank are interleaved, in as many microbatches as that can run."""
    given = ("pp=2,dp=4,virtual_stages=2", "pp=2,dp=4,schedule=interleaved")
    assert main(["compare", "hf:llama3-8b-tiny", "--cluster", "h100x8", "--json", *given]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert one["strategy"] == two["strategy"] == "microbatches=8,schedule=interleaved,virtual_stages=2"
