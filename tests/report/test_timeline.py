"""The grid of a schedule: what people read."""

import io
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from autopar.cost.schedule import NAMES, schedule
from autopar.cost.timeline import Times, simulate
from autopar.report.timeline import grid

FOUR = """\
1f1b: 3 stages on 3 ranks, 4 microbatches, 18.00 ms a step, 33.3% bubble
rank                                                            idle  held
   0  F0 F1 F2             B0--- F3 B1---    B2---    B3---    33.3%     3
   1     F0 F1       B0--- F2 B1--- F3 B2---    B3---          33.3%     2
   2        F0 B0--- F1 B1--- F2 B2--- F3 B3---                33.3%     1
 F  forward   B  backward   held: microbatches in flight at once"""


def test_a_schedule_on_one_screen() -> None:
    line = simulate(schedule("1f1b", 3, 1, 4), Times.equal(3, 1e-3, 1e-3, 1e-3))
    assert grid(line).plain == FOUR


def test_stages_are_named_where_a_rank_has_several_and_parts_of_backwards_in_the_legend() -> None:
    text = grid(simulate(schedule("zbv", 2, 2, 2), Times.equal(4))).plain
    rows = text.split("\n")
    assert rows[2].startswith("   0  0F0 0F1 ") and "3F0" in rows[2] and "2W1" in rows[3]
    assert "I  gradients of inputs" in rows[-1] and "W  gradients of weights" in rows[-1] and "B " not in rows[-1]


def test_no_line_is_wider_than_asked() -> None:
    for name, width in product(NAMES, (60, 80, 120, 200)):
        plan = schedule(name, 4, 1 if name in ("gpipe", "1f1b") else 2, 32)
        lines = grid(simulate(plan, Times.equal(plan.stages)), width).plain.split("\n")
        assert all(len(text) <= width for text in lines[1:-1])
        assert all(" ⋯ " in text for text in lines[2:-1])
        assert len({len(text) for text in lines[1:-1]}) == 1


def test_a_step_that_fits_is_whole() -> None:
    text = grid(simulate(schedule("1f1b", 4, 1, 8), Times.equal(4))).plain
    assert "⋯" not in text and max(map(len, text.split("\n"))) <= 120


def test_colours_in_a_terminal_only() -> None:
    text = grid(simulate(schedule("1f1b", 2, 1, 2), Times.equal(2)))
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain, width=120, color_system=None).print(text)
    Console(file=coloured, width=120, force_terminal=True, color_system="standard").print(text)
    assert plain.getvalue().rstrip() == text.plain and "\x1b[" in coloured.getvalue()


durations = st.floats(1e-6, 1e-2)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.data())
def test_unequal_stages(name: str, p: int, data: st.DataObject) -> None:
    """However uneven, every row is equally long, and a row that is not cut shows all of its actions in order."""
    plan = schedule(name, p, 1 if name in ("gpipe", "1f1b") else 2, 2 * p)
    n = plan.stages
    parts = [tuple(data.draw(st.lists(durations, min_size=n, max_size=n))) for _ in range(3)]
    rows = grid(simulate(plan, Times(*parts)), 10_000).plain.split("\n")[1:-1]
    assert len(rows) == p + 1 and len({len(row) for row in rows}) == 1
    if "⋯" not in rows[1]:
        for rank, row in enumerate(rows[1:]):
            kinds = [c for c in row if c in "FBIW"]
            assert kinds == [a.kind for a in plan.orders[rank]]
