"""The page of a comparison: whole, offline, and drawn by a browser."""

import contextlib
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from autopar.cli.arguments import split_axes
from autopar.cli.main import main
from autopar.cost.table import duration, size
from autopar.models import load
from autopar.planner import compare
from autopar.plans import rehearsed
from autopar.report.figures import short

MODEL = "hf:llama3-8b-tiny"
STRATEGIES = ["dp=4,zero=3", "dp=2,tp=2,sequence_parallel=true", "pp=2,dp=2,microbatches=4"]
PARTS = ["strategies", "time", "memory", "pareto", "timeline", "ranks", "mesh", "layer"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page, and what the command prints."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command = ["compare", MODEL, "--cluster", "h100x4", *STRATEGIES, "--html", str(path), "--json"]
        assert main(command) == 0
    return path, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def page(made):
    return made[0]


def test_the_page_says_what_it_is_of_and_long_names_leave_room(page):
    text = page.read_text(encoding="utf-8")
    assert "on 4 devices (h100); a step of 16 rows of 16 positions" in text
    assert short("pp=4,dp=8,tp=2,microbatches=16,zero=1").split("<br>") == ["pp=4,dp=8,tp=2,", "microbatches=16,zero=1"]
    assert short("fsdp") == "fsdp" and max(map(len, short("x" * 40 + ",y=1").split("<br>"))) == 41


def test_the_table_and_the_page_have_the_numbers_of_the_timeline(made):
    """With stages a search's sums are not the simulated step: every number shown is the latter's."""
    page, rows = made
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page.read_text(encoding="utf-8"))
    loaded, asked = load(MODEL), [(s, *split_axes(s)) for s in STRATEGIES]
    plans = compare(loaded.model.train(), "h100x4", (), loaded.kwargs(2, loaded.sequence), asked, batch=16)
    steps = [(plan, rehearsed(plan)) for _, plan in plans]
    assert steps[2][1].option.seconds != pytest.approx(steps[2][0].seconds, rel=1e-3)
    for name, row, (_, step) in zip(STRATEGIES, rows, steps, strict=True):
        late = max(g + o for g, o in zip(step.gradients, step.optimizer))
        assert row["step_seconds"] == pytest.approx(step.timeline.seconds + late)
        assert row["peak_bytes"] == pytest.approx(max(sum(kinds.values()) for kinds in step.memory))
        at = cells.index(name)
        assert (cells[at + 2], cells[at + 6]) == (duration(row["step_seconds"]), size(row["peak_bytes"]))


def test_the_page_has_every_part_and_asks_for_nothing_from_outside(page):
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert [a["id"] for t, a in tags.found if t == "section"] == PARTS
    linked = [a.get(k) for _, a in tags.found for k in ("src", "href") if a.get(k)]
    assert linked == ["data:,", *(f"#{p}" for p in PARTS)]
    boxes = sum(t == "g" for t, _ in tags.found)
    assert boxes > 20 and sum(t == "path" for t, _ in tags.found) > 20


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH")
def test_a_browser_without_a_network_draws_every_chart(page):
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr", "--window-size=1300,3000", "--virtual-time-budget=20000", "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert "Uncaught" not in done.stderr
    tags = Tags()
    tags.feed(done.stdout)
    charts = {a["id"] for t, a in tags.found if t == "div" and "js-plotly-plot" in (a.get("class") or "")}
    assert charts == {
        "time-0",
        "memory-0",
        "pareto-0",
        "mesh-0",
        *(f"{p}-{i}" for p in ("timeline", "ranks") for i in range(3)),
    }
    drawn = sum(t == "svg" and "main-svg" in (a.get("class") or "") for t, a in tags.found)
    assert drawn >= len(charts)
