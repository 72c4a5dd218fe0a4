"""One candidate simulated: its time is the search's where the schedule is plain, its memory is a moment's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.cli.arguments import split_axes
from autopar.cost import links as links_of
from autopar.cost.candidates import ORDER
from autopar.cost.forms import Forms
from autopar.cost.hardware import load as profile
from autopar.cost.links import Links
from autopar.cost.regime import Regime, ours
from autopar.cost.rehearsal import Rehearsal, rehearse
from autopar.cost.search import Question, every_grid
from autopar.cost.space import Space
from autopar.cost.units import send_seconds
from autopar.families import families
from autopar.ir.mesh import Mesh
from autopar.models import load
from autopar.planner import compare
from autopar.plans import closer, rehearsed

STRATEGIES = (
    "dp=4",
    "dp=2,tp=2",
    "dp=4,zero=3",
    "pp=4,microbatches=8,schedule=gpipe",
    "pp=4,microbatches=8,schedule=1f1b",
)


@pytest.fixture(scope="module")
def steps() -> dict[str, tuple[object, Rehearsal]]:
    model = load("hf:llama3-8b-tiny").model.train()
    model.config.num_hidden_layers = 2
    ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    asked = [(s, *split_axes(s)) for s in STRATEGIES]
    rows = compare(
        model, "a100-80gx4", (), {"input_ids": ids, "labels": ids.clone()}, asked, batch=32, sequence=64,
        precision="fp32",
    )  # fmt: skip
    out = {}
    for name, plan in rows:
        step = rehearsed(plan)
        assert step is not None
        out[name] = plan, step
    return out


@pytest.mark.parametrize("offload", [False, True])
def test_without_stages_the_time_is_that_of_the_search(offload):
    """With rings, Ulysses, experts' axes, copies of shards, host time and what the device hides: one set of prices."""
    model, machine = (
        load("hf:llama3-8b-tiny").model.train(),
        replace(profile("h100x16"), host=1e-6, unit=2e-6, overlap=0.7),
    )
    ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    forms = tuple(Forms(f) for f in families(model, (), {"input_ids": ids, "labels": ids.clone()}).values())
    question = Question(forms, machine, Space(16, 8, 64, 128, ("dp", "cp", "tp"), offload), Regime(overlap=0.8), np.inf)
    kinds = set()
    for form, grid in every_grid(question):
        for option in question.options(form, grid.candidates, np.flatnonzero(grid.legal)[::29]):
            found = rehearse(form, machine, option, question.regime, 128).option
            assert found.seconds == pytest.approx(option.seconds, rel=1e-9), (option.mesh, option.strategy)
            assert found.exposed == pytest.approx(option.exposed) and found.optimizer == pytest.approx(option.optimizer)
            states = ("parameters", "optimizer")
            assert [found.memory[k] for k in states] == pytest.approx([option.memory[k] for k in states])
            kinds |= {option.context, option.recompute, option.zero, option.shard > 0, option.sequence}
    assert kinds >= {"ring", "ulysses", "full", "selective", 1, 3}


@pytest.mark.parametrize(("mesh", "reach"), [("pp=2,dp=8", "outer"), ("dp=8,pp=2", "inner")])
def test_a_message_between_stages_costs_what_the_pipeline_pass_takes_it_for(mesh, reach):
    machine, sizes = profile("h100x16"), Mesh.parse(mesh)
    tier = getattr(machine, reach)
    seconds = send_seconds(1e6, machine, sizes)
    assert seconds == pytest.approx(tier.base + tier.latency + 1e6 / tier.rate("p2p"))
    axes = {a: np.array([float(sizes.size(a))]) for a in ORDER}
    links = Links.placed(machine, axes, (*(a for a in ORDER if a not in sizes.names), *sizes.names))
    across = axes["pp"] * links.strides["pp"] > machine.node
    assert float(links_of.send_seconds(machine, 1e6, across)[0]) == pytest.approx(seconds)


def test_a_moment_holds_no_more_than_everything(steps):
    for plan, step in steps.values():
        kept, found = plan.option.memory, step.option.memory
        assert all(found[k] <= kept[k] * 1.001 + 1 for k in ("parameters", "gradients", "optimizer"))


def test_what_fits_in_a_search_fits_when_it_is_looked_at_closer():
    """A search never promises less memory than the fullest moment of a rehearsal takes, but for rounding of stages."""
    model, machine = load("hf:llama3-8b-tiny").model.train(), profile("h100x8")
    ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    forms = tuple(Forms(f) for f in families(model, (), {"input_ids": ids, "labels": ids.clone()}).values())
    question = Question(forms, machine, Space(8, 4, 32, 128), ours(4, "bf16"), np.inf)
    whole = 0
    for form, grid in every_grid(question):
        for option in question.options(form, grid.candidates, np.flatnonzero(grid.legal)[::17]):
            found = rehearse(form, machine, option, question.regime, 128).option
            assert found.peak <= option.peak * 1.01, (option.words, found.memory, option.memory)
            whole += option.zero == 1 and option.microbatches > 1
    assert whole  # of which every rank keeps whole gradients until the last microbatch


def test_gpipe_holds_the_activations_of_all_microbatches_and_1f1b_of_as_many_as_stages_follow(steps):
    gpipe, alternating = (steps[s][1].memory for s in STRATEGIES[3:])
    assert gpipe[0]["activations"] > 1.5 * alternating[0]["activations"]
    assert all(a["activations"] >= b["activations"] for a, b in zip(gpipe, alternating))


def test_without_gradients_kept_from_another_microbatch_the_fullest_moment_has_none(steps):
    assert steps["dp=4"][1].option.memory["gradients"] == 0 < steps["dp=4"][0].option.memory["gradients"]


def test_what_is_sent(steps):
    sent = {s: {(t.axis, t.collective): t.bytes for t in steps[s][1].traffic} for s in STRATEGIES}
    whole = 4 * 3 * sum(p.numel() for p in load("hf:llama3-8b-tiny").model.parameters()) / 4
    assert sent["dp=4"] == {("dp", "all_reduce"): pytest.approx(2 * whole, abs=64)}  # and counts of tokens
    assert sent["dp=4,zero=3"]["dp", "reduce_scatter"] == pytest.approx(whole)
    assert {axis for axis, _ in sent["dp=2,tp=2"]} == {"dp", "tp"} and ("pp", "send") in sent[STRATEGIES[3]]


def test_closer_takes_the_rehearsal_s_numbers(steps):
    plan, step = steps[STRATEGIES[3]]
    near = closer(plan, step)
    assert (near.seconds, near.memory) == (step.option.seconds, step.option.peak) and closer(plan, None) is plan


def test_host_time_of_a_profile_counts_for_every_op(steps):
    assert profile("cpu").host == 0 and profile("cpu").overlap == 1
