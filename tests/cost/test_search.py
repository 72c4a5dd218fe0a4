"""The search: every candidate priced alike, ranked the same on every machine, within its budget."""

import itertools
import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.cli.main import main
from autopar.cost import hardware as profiles
from autopar.cost.balance import even_starts
from autopar.cost.candidates import SCHEDULES, Candidates
from autopar.cost.communication import collective_seconds as one_link
from autopar.cost.communication import link_between
from autopar.cost.forms import Forms
from autopar.cost.formulas import terms, tidy
from autopar.cost.links import collective_seconds, inside
from autopar.cost.regime import Regime, ours
from autopar.cost.schedule import occupancies, schedule
from autopar.cost.search import search
from autopar.cost.space import Space, grids
from autopar.cost.step import Group, steps
from autopar.cost.stored import from_data, to_data
from autopar.cost.symbols import evaluate
from autopar.errors import AutoparError
from autopar.families import families
from autopar.models import load
from autopar.planner import accelerator, plan
from autopar.ranking import planned, space_of

MACHINE = profiles.load("h100x16")
TEXT = {n: torch.zeros(2, 64, dtype=torch.int64, device="meta") for n in ("input_ids", "labels")}


@pytest.fixture(scope="module")
def forms():
    model = load("hf:llama3-8b-tiny").model.train()
    return [Forms(f) for f in families(model, (), TEXT).values()]


@pytest.fixture(scope="module")
def plans(forms):
    return planned(forms, MACHINE, Space(16, 8, 64, 128), Regime(), 10)


@pytest.mark.parametrize("name", ["h100", "h100-efa"])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_links_in_arrays_are_those_of_one_link(collective, name):
    machine = profiles.load(name)
    for ways, stride in itertools.product((1, 2, 4, 8, 16, 64), (1, 2, 8, 16)):
        link = link_between(machine, ways, stride)
        expected = one_link(collective, 1e9, ways, link)
        near = inside(machine.node, [(np.array([ways]), np.array([stride]))], ways * stride)
        assert float(collective_seconds(machine, collective, 1e9, np.array([ways]), near)[0]) == pytest.approx(expected)


def test_all_candidates_are_the_product_of_the_degrees(forms):
    for grid in grids(Space(16, 8, 64, 128), forms[0].family):
        table = grid.candidates
        assert set(np.prod(list(table.sizes.values()), axis=0).flat) == {16.0}
        assert set((table.rows * table.microbatches * table.sizes["dp"] * table.sizes["ep"]).flat) == {64.0}


def test_a_grid_prices_each_candidate_as_alone(forms):
    """Alone means by its parts, whose sums are the totals of the grid."""
    seen = 0
    for grid in itertools.islice(grids(Space(16, 8, 64, 128), forms[0].family), 0, None, 3):
        totals = Group(forms[0], MACHINE, grid.candidates, Regime()).totals()
        seconds, peak = (np.broadcast_to(v, grid.legal.shape).reshape(-1) for v in totals)
        for i in np.flatnonzero(grid.legal)[::17]:
            alone = steps(forms[0], MACHINE, grid.candidates.take(np.array([i])), Regime())
            assert alone.seconds[0] == pytest.approx(seconds[i], rel=1e-9)
            assert alone.peak[0] == pytest.approx(peak[i], rel=1e-9)
            seen += 1
    assert seen > 50


def test_the_best_is_the_fastest_that_fits(forms, plans):
    fastest = []
    for family in forms:
        for grid in grids(Space(16, 8, 64, 128), family.family):
            seconds, peak = Group(family, MACHINE, grid.candidates, Regime()).totals()
            inside = grid.legal & (peak <= plans.found.limit)
            fastest.append(np.where(inside, seconds, np.inf).min())
    assert plans[0].seconds == pytest.approx(min(fastest))
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)


def test_of_plans_that_are_as_fast_the_one_that_works_less_is_the_first():
    """Where gradients take longer than the backward, recomputation hides behind them; it saves memory that is there."""
    loaded = load("hf:vit-base")
    plans = plan(loaded.model.train(), "h100x13", (), loaded.kwargs(2, 1), count=6, lower=0)
    first, more = plans[0], next(p for p in plans if p.option.recompute == "full")
    assert first.option.recompute == "none" and first.seconds == pytest.approx(more.seconds)
    assert more.option.compute > 1.1 * first.option.compute and more.memory < first.memory
    assert "more work, which is hidden" in first.why(more.option)


def test_what_is_decided_is_kept(forms):
    given = (("zero", 3), ("recompute", "full"), ("microbatches", 2))
    fixed = Space(16, 8, 64, 128, fixed=(("tp", 2), ("dp", 4)), given=given)
    for plan_ in planned(forms, MACHINE, fixed, Regime(), 10):
        o = plan_.option
        assert (o.sizes["tp"], o.sizes["dp"], o.zero, o.recompute, o.microbatches) == (2, 4, 3, "full", 2)
        assert o.order.index("tp") < o.order.index("dp")


def test_nothing_that_the_engine_refuses_is_a_candidate(forms):
    """Split backwards with recomputation, and offload without shards, are refused when they are compiled."""
    for offload in (False, True):
        for grid in grids(Space(8, 8, 64, 128, offload=offload), forms[0].family):
            c = grid.candidates.take(np.flatnonzero(grid.legal))
            split = np.isin(c.schedule, [SCHEDULES.index(n) for n in ("zero-bubble", "zbv")])
            assert not (split & (c.recompute > 0)).any()
            assert not ((c.offload == 1) & (c.zero == 0)).any()


def test_the_front_has_nothing_that_is_beaten(plans):
    front = [(p.seconds, p.memory) for p in plans.front]
    assert all(a[0] <= b[0] and a[1] > b[1] for a, b in itertools.pairwise(front))


def test_the_order_is_the_same_every_time(forms, plans):
    again = planned(forms, MACHINE, Space(16, 8, 64, 128), Regime(), 10)
    assert [(p.mesh, p.strategy) for p in again] == [(p.mesh, p.strategy) for p in plans]


def test_neighbours_are_worse_and_say_why(plans):
    best = plans[0]
    found = best.neighbours()
    assert len(found) >= 4
    for _, option in found:
        assert option.peak > plans.found.limit or option.seconds >= best.seconds * (1 - 1e-9)
        assert best.why(option)
    assert "neighbours" in best.explain()


def test_nothing_fits_says_what_is_over_and_what_would_fit(forms):
    small = profiles.load("h100x2")
    tight = search(forms, small, Space(2, 8, 4, 128), Regime(reserve=1e12), 1e9)
    assert not tight.ranked and tight.least[0].peak > 1e9
    hint = planned(forms, small, Space(2, 8, 4, 128), Regime(reserve=1e12), 3).hint
    assert "nothing fits" in hint and "over" in hint


def test_states_in_host_memory_fit_there_or_are_refused(forms):
    """A node has so much of it, which its ranks share; what is refused says that it is host memory."""
    space = space_of(MACHINE, 64, 128, fixed=(("dp", 16),), given=(("offload", "cpu"),))
    regime = ours(4, "bf16")
    wide = planned(forms, MACHINE, space, regime, 100)
    elements = sum(p.numel() for p in load("hf:llama3-8b-tiny").model.parameters())
    whole = next(p.option for p in wide if not p.option.shard)
    assert whole.host == pytest.approx(16 * elements / 16)  # parameter, gradient and two moments, in float32
    most = max(p.option.host for p in wide)
    assert most == pytest.approx(2 * whole.host)  # of two copies
    tight = replace(MACHINE, host_memory=8 * 0.99 * most / 0.9)
    left = planned(forms, tight, space, regime, 100)
    assert len(left) > 0 and max(p.option.host for p in left) < most and all(p.fits for p in left)
    large = next(p for p in wide if p.option.host == most)
    assert not replace(large, found=left.found).fits and "in host memory" in left[0].why(large.option)
    none = planned(forms, replace(MACHINE, host_memory=8.0), space, regime, 3)
    assert not none and "of host memory a device" in none.hint and "over in host memory" in none.hint
    assert "in host memory" in wide[0].explain()


def test_planning_allocates_no_model():
    model = load("hf:gpt2").model
    tracemalloc.start()
    made = plan(model, "h100x8", (), TEXT, batch=32, sequence=512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made and peak < 2**29
    assert all(p.is_meta for p in model.parameters())


def test_a_cluster_needs_its_number_of_devices():
    with pytest.raises(AutoparError) as error:
        plan(load("hf:gpt2-tiny").model, "h100", (), TEXT)
    assert error.value.slug == "bad-cluster"


def test_stages_are_balanced_by_work(forms):
    assert even_starts((1.0, 1.0, 1.0, 3.0), 2) == (0, 3)
    counts = forms[0].stages(2, 1, cuts="even")
    assert counts.sum(axis=0).tolist() == [1.0, 2.0, 1.0]


def test_the_command_prints_plans(capsys):
    assert main(["plan", "hf:llama3-8b-tiny", "h100x4", "--seq", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found and {"mesh", "strategy", "step_seconds", "peak_bytes"} <= set(found[0])


def test_the_command_compares_presets_and_auto(capsys):
    assert (
        main(["compare", "hf:llama3-8b-tiny", "--cluster", "h100x4", "--seq", "64", "fsdp", "zero1", "auto", "--csv"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["name", "fsdp", "zero1", "auto"]


def test_auto_asks_for_a_device_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, profile in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert accelerator() == profile
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    with pytest.raises(AutoparError, match="no profile of 'NVIDIA L4'"):
        accelerator()


def test_a_search_knows_what_each_schedule_keeps(forms):
    """On every rank, as the schedule's own order tells; 1F1B and GPipe are not all that there is."""
    count = 0
    for virtual, kinds in {1: ("1f1b", "gpipe", "zero-bubble"), 2: ("interleaved", "zbv"), 4: ("interleaved",)}.items():
        for kind, (p, m) in itertools.product(kinds, ((2, 4), (4, 4), (4, 8), (8, 16))):
            one = {n: np.zeros(1) for n in ("zero", "shard", "recompute", "offload", "ulysses")}
            sizes = {a: np.array([float(p if a == "pp" else 1)]) for a in ("pp", "dp", "ep", "cp", "tp")}
            table = Candidates(
                sizes, np.ones(1), np.array([float(m)]), schedule=np.array([float(SCHEDULES.index(kind))]),
                virtual=np.array([float(virtual)]), positions=64.0, **one,
            )  # fmt: skip
            group = Group(forms[0], MACHINE, table, Regime())
            group.first = np.arange(p)
            real = [max(sum(x) / len(x) for x in occupancies(schedule(kind, p, virtual, m), r)) for r in range(p)]
            found = np.broadcast_to(group._in_flight(), (p, 1))[:, 0]
            few = kind == "zbv" and m < 2 * p  # too few to fill both ways
            assert all(found >= real) if few else found == pytest.approx(real), (kind, p, virtual, m)
            count += not few
    assert count == 23


def test_a_plan_explains_itself_in_closed_forms_with_their_values(plans):
    """As symbols alone say, at the plan's sizes; of another number of ranks, or nothing, there is no line."""
    plan = next(p for p in plans if p.option.sizes["tp"] == 1)
    text = plan.explain()
    family = next(f.family for f in plan.found.question.forms if f.family.sequence == plan.option.sequence)
    unit = family.units[1]
    form = terms(unit)["matmul flops, forward"]
    at = {**plan.option.sizes, "b": plan.option.rows, "s": 128 / plan.option.sizes["cp"]}
    assert tidy(form) in text and f"{evaluate(form, at) / 1e6:.4g} MFLOP" in text
    assert "tp all_reduce" not in text and "copies beside tp" not in text and "tp > 1" not in text


def test_closed_forms_of_text_are_those_of_the_program(forms):
    kept = from_data(json.loads(json.dumps(to_data(f.family for f in forms))))
    for made, read in zip(forms, kept):
        for a, b in zip(made.family.units, read.units):
            assert {n: tidy(v) for n, v in terms(a).items()} == {n: tidy(v) for n, v in terms(b).items()}
