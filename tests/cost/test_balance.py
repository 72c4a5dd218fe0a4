"""Stages: as even as the best of all cuts, within memory, by name, and refused with the numbers that count."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost import coupled
from autopar.cost.balance import Balance, Unit, at_names, balance, filled_starts
from autopar.cost.schedule import Schedule, schedule
from autopar.cost.timeline import simulate
from autopar.errors import AutoparError

PLANS = [("1f1b", 3, 1), ("gpipe", 4, 1), ("interleaved", 2, 2), ("interleaved", 2, 3), ("zbv", 2, 2), ("zbv", 3, 2)]


def chain(blocks: int, head: float = 3.0) -> list[Unit]:
    """An embedding, equal blocks, and a head of ``head`` blocks' work."""
    first = Unit("embed", 0.1, 0.0, 0.1, states=8, activations=0.1)
    last = Unit("head", head, head, head, states=8, activations=2)
    return [first, *(Unit(f"layers.{i}", 1, 1, 1, states=3, activations=1) for i in range(blocks)), last]


def all_cuts(units: Sequence[Unit], plan: Schedule) -> list[Balance]:
    inner = [i for i, u in enumerate(units) if i and u.starts]
    return [Balance(tuple(units), plan, (0, *cut)) for cut in combinations(inner, plan.stages - 1)]


sizes = st.one_of(st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0]), st.floats(0.01, 5))
units_of = st.lists(
    st.builds(Unit, st.just("u"), sizes, sizes, sizes, st.just(0), sizes, sizes, st.sampled_from([True] * 4 + [False])),
    min_size=3,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(units_of, st.sampled_from(PLANS), st.data())
def test_the_best_of_all_cuts(units: list[Unit], counts: tuple[str, int, int], data: st.DataObject) -> None:
    plan = schedule(*counts, 6)
    every = all_cuts(units, plan)
    if not every:
        with pytest.raises(AutoparError, match="too-many-stages"):
            balance(units, plan)
        return
    assert max(balance(units, plan).seconds) == pytest.approx(min(max(c.seconds) for c in every))
    needs = sorted(max(c.bytes) for c in every)
    limit = data.draw(st.sampled_from(needs)) * (1 + 1e-6)
    fitting = [c for c in every if max(c.bytes) <= limit]
    found = balance(units, plan, limit)
    assert max(found.bytes) <= limit * (1 + 1e-6)
    assert max(found.seconds) == pytest.approx(min(max(c.seconds) for c in fitting))
    if needs[0] > 0:
        with pytest.raises(AutoparError, match="stage-memory"):
            balance(units, plan, needs[0] * 0.99)


@settings(max_examples=60, deadline=None)
@given(units_of, st.sampled_from(PLANS), st.data())
def test_descent_fits_and_never_claims_more_than_the_best(
    units: list[Unit], counts: tuple[str, int, int], data: st.DataObject
) -> None:
    """Where the cuts are too many to try them all; here they are few, so that the best is known."""
    plan = schedule(*counts, 6)
    every = all_cuts(units, plan)
    limit = data.draw(st.sampled_from(sorted(max(c.bytes) for c in every))) * 1.5 if every else 0.0
    if not limit:
        return
    best = min(max(c.seconds) for c in every if max(c.bytes) <= limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coupled, "FEW", 0)
        try:
            found = balance(units, plan, limit)
        except AutoparError as error:
            assert error.slug == "stage-memory"
            return
    assert max(found.bytes) <= limit * (1 + 1e-6) and max(found.seconds) >= best * (1 - 1e-6)


@pytest.mark.parametrize("name, p, v", [("interleaved", 16, 4), ("zbv", 16, 2), ("interleaved", 16, 2)])
def test_a_long_chain_fits_where_dynamic_programming_alone_does_not(name: str, p: int, v: int) -> None:
    plan = schedule(name, p, v, 64)
    free = balance(chain(126), plan)
    limit = max(free.bytes) * 0.97
    found = balance(chain(126), plan, limit)
    assert max(found.bytes) <= limit < max(free.bytes)
    assert max(found.seconds) <= max(free.seconds) * 1.01
    assert found == balance(chain(126), plan, limit)


def test_a_heavy_head_gets_fewer_blocks() -> None:
    found = balance(chain(13), schedule("1f1b", 4, 1, 8))
    assert [len(found.units_of(s)) for s in range(4)] == [5, 4, 4, 2]
    assert found.seconds == pytest.approx((12.2, 12, 12, 12))
    assert found.slowest_over_mean == pytest.approx(12.2 * 4 / 48.2)


def test_equal_cuts_are_told_apart_by_evenness_then_order() -> None:
    """Of 5 blocks on 3 stages, 2 2 1 in some order are best; the same one always comes out."""
    units = [Unit(f"b{i}", 1, 1, 1) for i in range(5)]
    plan = schedule("1f1b", 3, 1, 3)
    assert {balance(units, plan).starts for _ in range(3)} == {(0, 1, 3)}
    # A bottleneck at the head leaves the rest free, which is still cut evenly.
    long = [Unit(f"b{i}", 1, 1, 1) for i in range(8)] + [Unit("head", 9, 9, 9)]
    assert sorted(balance(long, schedule("1f1b", 5, 1, 5)).seconds) == [6, 6, 6, 6, 27]


def test_memory_moves_blocks_to_where_fewer_microbatches_are_in_flight() -> None:
    """In 1F1B the first of 4 stages keeps 4 microbatches, the last one 1."""
    units = [Unit(f"b{i}", 1, 1, 1, states=1, activations=1) for i in range(8)]
    plan = schedule("1f1b", 4, 1, 8)
    assert balance(units, plan).bytes == (10, 8, 6, 4)
    tight = balance(units, plan, 8)
    assert tight.bytes == (5, 8, 6, 6) and tight.starts == (0, 1, 3, 5)
    with pytest.raises(AutoparError, match="stage-memory") as caught:
        balance(units, plan, 7)
    assert "7 B" in str(caught.value) and "8 B on rank" in str(caught.value) and "1 B too much" in str(caught.value)


def test_a_rank_of_two_stages_holds_both() -> None:
    units = [Unit(f"b{i}", 1, 1, 1, states=10, activations=1) for i in range(4)]
    found = balance(units, schedule("zbv", 2, 2, 6))
    # Stages 0 and 3 on rank 0: 20 of states; 4 and 0 microbatches at its fullest moment.
    assert found.bytes == (24, 24)


def test_more_stages_than_blocks() -> None:
    units = [Unit("a", 1, 1, 1), Unit("b", 1, 1, 1), Unit("glue", 0, 0, 0, starts=False), Unit("c", 1, 1, 1)]
    with pytest.raises(AutoparError, match="too-many-stages") as caught:
        balance(units, schedule("zbv", 2, 2, 4))
    assert "4 stages (2 ranks × 2)" in str(caught.value) and "3 blocks" in str(caught.value)
    assert "at most 3" in str(caught.value)
    assert balance(units, schedule("1f1b", 3, 1, 4)).starts == (0, 1, 3)


def test_stages_by_name() -> None:
    units, plan = chain(6), schedule("1f1b", 3, 1, 4)
    assert at_names(units, plan, ["layers.3", "head"]).starts == (0, 4, 7)
    assert at_names(units, plan, ["layers.0", "layers.3", "head"]).starts == (0, 4, 7)
    assert at_names(units, plan, ["embed", "layers.3", "head"]).starts == (0, 4, 7)
    assert at_names(units, schedule("gpipe", 1, 1, 1), []).starts == (0,)


@pytest.mark.parametrize(
    "names",
    [["layers.3"], ["head", "layers.3"], ["layers.3", "layers.3"], ["layers.3", "layers.9"], ["embed", "head"]],
)
def test_wrong_names(names: list[str]) -> None:
    with pytest.raises(AutoparError, match="stage-names") as caught:
        at_names(chain(6), schedule("1f1b", 3, 1, 4), names)
    assert "layers.0" in str(caught.value)


def test_no_stage_begins_inside_what_belongs_together() -> None:
    units = [Unit("a", 1, 1, 1), Unit("b", 1, 1, 1, starts=False), Unit("c", 1, 1, 1)]
    with pytest.raises(AutoparError, match="no stage can begin at 'b'"):
        at_names(units, schedule("gpipe", 2, 1, 1), ["b"])


def test_times_of_the_stages_go_to_the_simulator() -> None:
    found = balance(chain(6), schedule("1f1b", 4, 1, 8))
    times = found.times(((0.1, 0.1),) * 3)
    assert sum(times.forward) == pytest.approx(9.1) and sum(times.weight) == pytest.approx(9.1)
    assert sum(times.input) == pytest.approx(9.0)
    assert simulate(found.schedule, times).seconds > 8 * max(found.seconds)


def test_stages_that_are_filled_one_by_one() -> None:
    """20 units of work on 2, 4 and 8 stages, the last of which is worth 4: as nanotron's runs of 16 layers show."""
    costs = (0.0, *(1.0,) * 16, 4.0)
    assert filled_starts(costs, 2) == (0, 11)
    assert filled_starts(costs, 4) == (0, 6, 11, 16)
    assert filled_starts(costs, 8)[:4] == (0, 4, 6, 9)
    assert filled_starts((1.0, 1.0), 4) == (0, 1, 2, 2)
