"""Schedules in time: published bubbles, sends and waits, what cannot run."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.schedule import NAMES, schedule
from autopar.cost.timeline import Times, simulate
from autopar.errors import AutoparError


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_is_p_minus_one_of_m_and_p_minus_one(name: str) -> None:
    for p, m in product((1, 2, 3, 4, 8), (1, 2, 4, 7, 8, 32)):
        if name == "1f1b" and m < p:
            continue
        for times in (Times.equal(p), Times.equal(p, 3.0, 1.0, 4.0)):
            assert simulate(schedule(name, p, 1, m), times).bubble == pytest.approx((p - 1) / (m + p - 1))


def test_interleaving_divides_the_idle_time() -> None:
    for p, v, rounds in product((2, 4, 8), (2, 3, 4), (1, 2, 4)):
        m = p * rounds
        whole = simulate(schedule("1f1b", p, 1, m), Times.equal(p))
        cut = simulate(schedule("interleaved", p, v, m), Times.equal(p * v, 1 / v, 1 / v, 1 / v))
        assert cut.idle == pytest.approx([idle / v for idle in whole.idle])


def test_zero_bubbles_are_smaller_as_published() -> None:
    """Idle a rank: (p-1)(F+I+W), (p-1)(F+I-W), and half a forward a rank (arXiv:2401.10241, table 1 and section 6)."""
    for p in (2, 4, 8):
        m = 4 * p
        one = simulate(schedule("1f1b", p, 1, m), Times.equal(p))
        h1 = simulate(schedule("zero-bubble", p, 1, m), Times.equal(p))
        v = simulate(schedule("zbv", p, 2, m), Times.equal(2 * p, 0.5, 0.5, 0.5))
        assert one.bubble > h1.bubble > v.bubble > 0
        assert one.idle == pytest.approx([3.0 * (p - 1)] * p)
        assert h1.idle == pytest.approx([1.0 * (p - 1)] * p)
        assert v.idle == pytest.approx([0.5 * (p - 1)] * p)


def test_sends_are_asynchronous_and_receivers_wait() -> None:
    """Two stages, one microbatch: F, message, F, B, message back, B."""
    times = Times((1.0, 2.0), (1.0, 1.5), (0.5, 0.5), ((0.25, 0.75),))
    line = simulate(schedule("gpipe", 2, 1, 1), times)
    starts = [[(str(s.action), s.start, s.end) for s in spans] for spans in line.spans]
    assert starts == [[("0F0", 0, 1), ("0B0", 6.0, 7.5)], [("1F0", 1.25, 3.25), ("1B0", 3.25, 5.25)]]
    assert line.idle == (5.0, 3.5)
    # A second microbatch computes while the first is on its way.
    second = simulate(schedule("gpipe", 2, 1, 2), times).spans[0][1]
    assert (second.start, second.end) == (1, 2)


def test_stages_of_one_rank_send_nothing() -> None:
    assert simulate(schedule("zbv", 1, 2, 3), Times.equal(2, send=100.0)).bubble == 0
    # Four forwards, I3, I2, W2 before I1 on the same rank, I0, W0; of three cuts, the middle one is inside a rank.
    assert simulate(schedule("zbv", 2, 2, 1), Times.equal(4, send=100.0)).seconds == 4 * 100 + 10


times_of = st.floats(0.01, 10)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 3), st.data())
def test_bounds(name: str, p: int, rounds: int, data: st.DataObject) -> None:
    """Ranks work one action at a time, every microbatch crosses all stages both ways, and nothing starts early."""
    v = 2 if name not in ("gpipe", "1f1b") else 1
    m, n = 2 * p * rounds, p * v
    parts = [tuple(data.draw(st.lists(times_of, min_size=n, max_size=n))) for _ in range(3)]
    sends = tuple(data.draw(st.lists(st.tuples(times_of, times_of), min_size=n - 1, max_size=n - 1)))
    plan = schedule(name, p, v, m)
    line = simulate(plan, Times(*parts, sends))
    for rank in range(p):
        work = m * sum(part[s] for part in parts for s in plan.stages_of(rank))
        assert line.seconds - line.idle[rank] == pytest.approx(work) and line.idle[rank] >= -1e-9
        assert all(a.end <= b.start for a, b in zip(line.spans[rank], line.spans[rank][1:]))
    far = sum(sum(s) for i, s in enumerate(sends) if not plan.local(i))
    assert line.seconds >= sum(parts[0]) + sum(parts[1]) + far - 1e-9
    assert 0 <= line.bubble < 1


def test_what_can_never_run_is_refused() -> None:
    plan = schedule("1f1b", 2, 1, 2)
    first = plan.orders[0]
    with pytest.raises(AutoparError, match="schedule-deadlock") as caught:
        simulate(replace(plan, orders=((first[2], first[0], *first[1:2], *first[3:]), plan.orders[1])), Times.equal(2))
    assert "0B0" in str(caught.value)


def test_times_of_other_stages_are_refused() -> None:
    with pytest.raises(AutoparError, match=r"\[schedule\]"):
        simulate(schedule("gpipe", 2, 1, 2), Times.equal(3))
    with pytest.raises(AutoparError, match=r"\[schedule\]"):
        simulate(schedule("gpipe", 2, 1, 2), Times((1, 1), (1, 1), (1, 1), ((1, 1), (1, 1))))
