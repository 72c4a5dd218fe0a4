"""Schedules with a fault are caught, whatever the fault and wherever it is."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost.schedule import COMPUTE, NAMES, Action, Schedule, schedule
from autopar.cost.timeline import Times, simulate
from autopar.errors import AutoparError
from autopar.verify.schedule import check_actions, check_messages, check_progress, check_schedule

Orders = tuple[tuple[Action, ...], ...]


def plans() -> st.SearchStrategy[Schedule]:
    def make(name: str, p: int, rounds: int) -> Schedule:
        return schedule(name, p, 1 if name in ("gpipe", "1f1b") else 2, 2 * p * rounds)

    return st.builds(make, st.sampled_from(NAMES), st.integers(2, 4), st.integers(1, 2))


def with_order(plan: Schedule, rank: int, change: Callable[[list[Action]], None]) -> Schedule:
    """The plan with one rank's posts changed, and its orders accordingly."""
    order = list(plan.posts[rank])
    change(order)
    posts = tuple(tuple(order) if r == rank else o for r, o in enumerate(plan.posts))
    return replace(plan, posts=posts, orders=tuple(tuple(a for a in o if a.kind in COMPUTE) for o in posts))


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_a_dropped_action_is_caught(plan: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.ranks - 1))
    at = data.draw(st.integers(0, len(plan.posts[rank]) - 1))
    with pytest.raises(AutoparError, match="schedule-"):
        check_schedule(with_order(plan, rank, lambda o: o.pop(at)))


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_a_repeated_or_misplaced_action_is_caught(plan: Schedule, data: st.DataObject) -> None:
    rank, other = data.draw(st.permutations(range(plan.ranks)))[:2]
    action = data.draw(st.sampled_from(plan.posts[rank]))
    with pytest.raises(AutoparError, match="schedule-"):
        check_schedule(with_order(plan, rank, lambda o: o.append(action)))
    with pytest.raises(AutoparError, match="schedule-"):
        check_schedule(with_order(plan, other, lambda o: o.append(action)))


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_swapped_actions_are_caught_or_harmless(plan: Schedule, data: st.DataObject) -> None:
    """A swap is refused exactly when the simulated orders deadlock or messages no longer pair."""
    rank = data.draw(st.integers(0, plan.ranks - 1))
    i, j = data.draw(st.tuples(*[st.integers(0, len(plan.posts[rank]) - 1)] * 2))
    assume(i != j)

    def swap(order: list[Action]) -> None:
        order[i], order[j] = order[j], order[i]

    changed = with_order(plan, rank, swap)
    try:
        simulate(changed, Times.equal(plan.stages))
    except AutoparError:
        with pytest.raises(AutoparError, match="schedule-deadlock"):
            check_progress(changed)
    else:
        check_progress(changed)


def test_a_backward_before_its_forward_deadlocks_with_both_ends_named() -> None:
    plan = schedule("1f1b", 2, 1, 2)

    def swap(order: list[Action]) -> None:
        a, b = order.index(Action(1, "F", 0)), order.index(Action(1, "B", 0))
        order[a], order[b] = order[b], order[a]

    with pytest.raises(AutoparError, match="rank 0 at 0B0 for 1I0; rank 1 at 1B0 for 1F0") as caught:
        check_progress(with_order(plan, 1, swap))
    assert caught.value.slug == "schedule-deadlock"


def test_two_ranks_that_wait_for_each_other() -> None:
    """Each rank alone is in a good order; together they are a cycle."""
    plan = schedule("interleaved", 2, 2, 2)
    orders = [list(o) for o in plan.orders]
    first = Action(1, "F", 0)
    orders[1].remove(first)
    orders[1].insert(orders[1].index(Action(3, "F", 0)) + 1, first)
    with pytest.raises(AutoparError, match="rank 0 at 2F0 for 1F0; rank 1 at 3F0 for 2F0"):
        check_progress(replace(plan, orders=tuple(map(tuple, orders))))


def test_messages_in_another_order_than_they_are_received() -> None:
    plan = schedule("gpipe", 2, 1, 3)

    def swap(order: list[Action]) -> None:
        a, b = order.index(Action(0, "SEND_F", 1)), order.index(Action(0, "SEND_F", 2))
        order[b] = order[a]
        order.pop(a)
        order.insert(order.index(Action(0, "F", 2)) + 1, Action(0, "SEND_F", 2))

    with pytest.raises(AutoparError, match="message 1 from rank 0 to rank 1 is sent as 0F2 and received as 0F1"):
        check_messages(with_order(plan, 0, swap))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o.remove(Action(0, "SEND_F", 2)), "rank 0 never sends 0SEND_F2"),
        (lambda o: o.insert(0, Action(0, "SEND_F", 0)), "posts 0SEND_F0 before it has computed it"),
        (lambda o: o.remove(Action(0, "RECV_B", 1)), "runs 0B1 without 0RECV_B1"),
        (lambda o: o.append(Action(0, "SEND_B", 0)), "posts 0SEND_B0, which no stage"),
    ],
)
def test_faults_of_messages(change: Callable[[list[Action]], None], words: str) -> None:
    with pytest.raises(AutoparError, match=words) as caught:
        check_messages(with_order(schedule("gpipe", 2, 1, 3), 0, change))
    assert caught.value.slug == "schedule-messages"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o.remove(Action(0, "B", 1)), "stage 0, microbatch 1 runs F: not F with B"),
        (lambda o: o.append(Action(0, "W", 1)), "stage 0, microbatch 1 runs B, F, W"),
        (lambda o: o.append(Action(0, "F", 7)), "0F7, which the step does not have"),
        (lambda o: o.append(Action(1, "F", 0)), "1F0, a stage of rank 1"),
        (lambda o: o.append(Action(0, "F", 0)), "0F0 runs 2 times"),
    ],
)
def test_faults_of_actions(change: Callable[[list[Action]], None], words: str) -> None:
    with pytest.raises(AutoparError, match=words) as caught:
        check_actions(with_order(schedule("gpipe", 2, 1, 3), 0, change))
    assert caught.value.slug == "schedule-actions"


def test_orders_and_posts_must_agree() -> None:
    plan = schedule("gpipe", 2, 1, 3)
    with pytest.raises(AutoparError, match="rank 1 computes another order"):
        check_messages(replace(plan, posts=(plan.posts[0], schedule("1f1b", 2, 1, 3).posts[1])))
