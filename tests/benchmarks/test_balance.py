"""The benchmark's own arithmetic."""

from itertools import combinations

from autopar.cost.balance import Unit, balance
from autopar.cost.schedule import schedule
from benchmarks.balance import least

SECONDS = [0.5, 3.0, 1.0, 2.0, 2.0, 1.0, 4.0]


def test_the_least_slowest_stage() -> None:
    every = [(0, *c, len(SECONDS)) for c in combinations(range(1, len(SECONDS)), 2)]
    slowest = [max(sum(SECONDS[a:b]) for a, b in zip(cut, cut[1:])) for cut in every]
    assert least(SECONDS, 3) == min(slowest) == 5.0
    assert least(SECONDS, 1) == sum(SECONDS)
    cut = balance([Unit(str(i), s, 0, 0) for i, s in enumerate(SECONDS)], schedule("1f1b", 3, 1, 3))
    assert max(cut.seconds) == 5.0


def test_too_many_cuts_are_not_tried() -> None:
    assert least([1.0] * 60, 16) is None
