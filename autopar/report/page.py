"""One page that says all of some plans, in one file: it works offline, in any browser."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cost.rehearsal import Rehearsal
from autopar.cost.table import duration, size
from autopar.errors import AutoparError
from autopar.measure import Measured
from autopar.plans import Plan, first_of
from autopar.report.blocks import AXES, WHOLE, Picture

MOST = 6  # strategies that are drawn rank by rank


@dataclass(frozen=True)
class Strategy:
    """One strategy of a page: its plan, the step as it is simulated, and what was measured."""

    name: str
    plan: Plan
    step: Rehearsal | None = None
    measured: Measured | None = None


@dataclass(frozen=True)
class Layers:
    """Pictures of layers. ``text``: of which strategy, or why there is none."""

    text: str
    pictures: Sequence[Picture] = ()


def page(title: str, subtitle: str, strategies: Sequence[Strategy], layers: Layers, front: Sequence[Plan] = ()) -> str:
    """The page as HTML, its scripts included. ``front``: the Pareto front of a search.

    Raises AutoparError ``missing-package`` without plotly and jinja2.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise AutoparError("missing-package", f"pictures need {error.name}", "pip install 'autopar[report]'") from None
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined).from_string(text)
    return template.render(
        title=title, subtitle=subtitle, library=get_plotlyjs(), parts=_parts(strategies, layers, front)
    )


def _parts(strategies: Sequence[Strategy], layers: Layers, front: Sequence[Plan]) -> list[dict[str, Any]]:
    from autopar.report import figures

    rows = [(s.name, s.plan) for s in strategies]
    measured = [s.measured for s in strategies]
    best = strategies[first_of([s.plan for s in strategies])]
    drawn = [(s.name, s.step) for s in strategies if s.step is not None][:MOST]
    ran = "Diamonds are measured on this machine. " if any(measured) else ""
    parts = [
        _part("strategies", "Strategies", "Green: the fastest that fits. Red does not fit.", table=_table(strategies)),
        _part("time", "Time", f"{ran}Communication is what nothing hides.", [figures.time_bars(rows, measured)]),
        _part("memory", "Memory", f"{ran}By kind, of the fullest rank.", [figures.memory_bars(rows, measured)]),
        _part(
            "pareto", "Memory and time", "Lower and further left is better.", [figures.pareto(rows, front, measured)]
        ),
    ]
    if drawn:
        parts.append(_part(
            "timeline", "Timeline", "A step as it is simulated: a row for each rank of the pipeline.",
            [(n, figures.timeline(s)) for n, s in drawn],
        ))  # fmt: skip
        parts.append(_part(
            "ranks", "Ranks", "Time and memory of each rank of the pipeline.",
            [(n, figures.rank_bars(s)) for n, s in drawn],
        ))  # fmt: skip
    parts.append(_part(
        "mesh", f"Mesh of {best.name}", f"{best.plan.mesh} on {best.plan.hardware.name}: boxes are nodes of "
        f"{best.plan.hardware.node}. The table says what one rank sends in a step, and through what.",
        [figures.mesh(best.plan)], table=_traffic(best.step) if best.step else None,
    ))  # fmt: skip
    key = [*AXES.items(), ("whole on every rank", WHOLE)]
    parts.append(_part("layer", "A layer", layers.text, pictures=layers.pictures, key=key if layers.pictures else ()))
    return parts


def _part(id: str, title: str, text: str, charts: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
    drawn = [c if isinstance(c, tuple) else ("", c) for c in charts]
    options = {"include_plotlyjs": False, "full_html": False, "config": {"displayModeBar": False, "responsive": True}}
    made = [(name, figure.to_html(div_id=f"{id}-{i}", **options)) for i, (name, figure) in enumerate(drawn)]
    return {"id": id, "title": title, "text": text, "figures": made, **more}


def _table(strategies: Sequence[Strategy]) -> dict[str, Any]:
    best = strategies[first_of([s.plan for s in strategies])].plan
    heads = ["", "mesh and strategy", "step", "tokens/s/device", "MFU", "bubble", "memory"]
    ran = any(s.measured for s in strategies)
    heads += ["measured step", "measured memory"] if ran else []
    rows = []
    for s in strategies:
        p = s.plan
        mark = "over" if not p.fits else "best" if p.seconds == best.seconds else ""
        cells = [
            s.name, p.words, duration(p.seconds), f"{p.tokens_per_second:,.0f}",
            f"{p.mfu:.1%}", duration(p.option.bubble), size(p.memory),
        ]  # fmt: skip
        if ran:
            cells += [duration(s.measured.step), size(s.measured.peak)] if s.measured else ["", ""]
        rows.append((mark, cells))
    return {"heads": heads, "rows": rows, "texts": [1]}


def _traffic(step: Rehearsal) -> dict[str, Any]:
    rows = [
        ("", [t.axis, t.collective, size(t.bytes), "inside a node" if t.inside else "between nodes"])
        for t in step.traffic
    ]
    return {"heads": ["axis", "collective", "sent by a rank in a step", "tier"], "rows": rows, "texts": []}
