"""Charts of plans: what a step's time and memory are made of, by strategy, by rank, and in order."""

import re
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autopar.cost.rehearsal import Rehearsal
from autopar.cost.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, WORDS
from autopar.measure import Measured
from autopar.plans import Plan
from autopar.report.blocks import AXES

Rows = Sequence[tuple[str, Plan]]
PARTS = {"compute": "#33475b", "bubble": "#d5dae1", "optimizer": "#a5744a"}
KINDS = {
    "parameters": "#33475b", "gradients": "#5d87a8", "optimizer": "#a5744a", "gathered": "#8fb8a8",
    "activations": "#e9a34a", "workspace": "#cdbfae",
}  # fmt: skip
ACTIONS = {FORWARD: "#4f8fd6", BACKWARD: "#46a274", INPUT: "#57b8ae", WEIGHT: "#a06bb4"}
RANKS, ACTS = 32, 6000  # that a timeline shows
GIB = 2.0**30
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"


def _look(figure: Any, height: int, **layout: Any) -> Any:
    figure.update_layout(
        height=height, template="plotly_white", font={"family": FONT, "size": 13, "color": "#24303c"},
        margin={"l": 10, "r": 20, "t": 10, "b": 44},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        bargap=0.35, **layout,
    )  # fmt: skip
    figure.update_xaxes(automargin=True, gridcolor="#edf0f3", zerolinecolor="#c9d1d9")
    figure.update_yaxes(automargin=True)
    return figure


def _unit(seconds: float) -> tuple[float, str]:
    """(factor, name) of the unit that a time reads well in."""
    return next(((1 / s, n) for n, s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if seconds >= s), (1e6, "µs"))


def _bytes(count: float) -> tuple[float, str]:
    return (1 / GIB, "GiB") if count >= GIB else (2.0**-20, "MiB")


def time_bars(rows: Rows, measured: Sequence[Measured | None]) -> Any:
    """A bar for each strategy: compute, exposed communication by axis, bubble, optimizer; diamonds are measured."""
    names = [n for n, _ in rows]
    scale, unit = _unit(max(p.seconds for _, p in rows))
    axes = [a for a in AXES if any(a in p.option.exposed for _, p in rows)]
    values = {"compute": [p.option.compute for _, p in rows]}
    values |= {f"{a} communication": [p.option.exposed.get(a, 0.0) for _, p in rows] for a in axes}
    values |= {"bubble": [p.option.bubble for _, p in rows], "optimizer": [p.option.optimizer for _, p in rows]}
    figure = go.Figure()
    for part, seconds in values.items():
        colour = PARTS.get(part) or AXES[part.split()[0]]
        _bar(figure, part, names, [s * scale for s in seconds], colour, unit)
    _diamonds(figure, names, [m.step * scale if m else None for m in measured], unit)
    figure.update_xaxes(title=f"a step, {unit}")
    figure.update_yaxes(autorange="reversed")
    return _look(figure, 110 + _height(rows) * len(rows), barmode="stack")


def memory_bars(rows: Rows, measured: Sequence[Measured | None]) -> Any:
    """A bar for each strategy: bytes of the fullest rank by kind; the line is what a rank may hold."""
    names, limit = [n for n, _ in rows], rows[0][1].found.limit
    scale, unit = _bytes(max(p.memory for _, p in rows))
    figure = go.Figure()
    for kind, colour in KINDS.items():
        held = [p.option.memory.get(kind, 0.0) * scale for _, p in rows]
        if any(held):
            _bar(figure, kind, names, held, colour, unit)
    _diamonds(figure, names, [m.peak * scale if m else None for m in measured], unit)
    if limit < 4 * max(p.memory for _, p in rows):
        figure.add_vline(x=limit * scale, line={"color": "#b3261e", "dash": "dash"}, annotation_text="limit")
    figure.update_xaxes(title=f"the fullest rank, {unit}")
    figure.update_yaxes(autorange="reversed")
    return _look(figure, 110 + _height(rows) * len(rows), barmode="stack")


def short(name: str, most: int = 30) -> str:
    """A strategy's name in lines that leave room for its bar: broken behind commas and blanks."""
    lines = [""]
    for word in re.findall(r"[^, ]+[, ]?", name):
        if len(lines[-1] + word) > most and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "<br>".join(lines)


def _height(rows: Rows) -> int:
    """Of a bar, with room for the name of most lines."""
    return max(44, *(17 * (short(n).count("<br>") + 1) for n, _ in rows))


def _bar(figure: Any, name: str, labels: Sequence[str], values: Sequence[float], colour: str, unit: str) -> None:
    figure.add_bar(
        y=[short(n) for n in labels], x=list(values), name=name, orientation="h", marker_color=colour,
        hovertemplate=f"%{{y}}<br>{name}: %{{x:.3g}} {unit}<extra></extra>",
    )  # fmt: skip


def _diamonds(figure: Any, names: Sequence[str], values: Sequence[float | None], unit: str) -> None:
    known = [(n, v) for n, v in zip(names, values) if v is not None]
    if known:
        figure.add_scatter(
            y=[short(n) for n, _ in known], x=[v for _, v in known], mode="markers", name="measured",
            marker={"symbol": "diamond", "size": 12, "color": "#111827", "line": {"color": "white", "width": 1.5}},
            hovertemplate=f"%{{y}}<br>measured: %{{x:.4g}} {unit}<extra></extra>",
        )  # fmt: skip


def rank_bars(step: Rehearsal) -> Any:
    """Time and memory of every rank of the pipeline, side by side."""
    line = step.timeline
    ranks = [f"rank {r}" for r in range(len(line.spans))][:RANKS]
    busy = [sum(s.end - s.start for s in spans) for spans in line.spans]
    scale, unit = _unit(line.seconds)
    small, word = _bytes(max(sum(m.values()) for m in step.memory))
    figure = make_subplots(1, 2, horizontal_spacing=0.12)
    parts = {
        "compute and messages": (busy, "#33475b"), "idle": (line.idle, PARTS["bubble"]),
        "gradients": (step.gradients, AXES["dp"]), "optimizer step": (step.optimizer, PARTS["optimizer"]),
    }  # fmt: skip
    for name, (seconds, colour) in parts.items():
        if any(seconds):
            values = [s * scale for s in seconds[:RANKS]]
            figure.add_bar(x=values, y=ranks, name=name, orientation="h", marker_color=colour, row=1, col=1)
    for kind, colour in KINDS.items():
        held = [m.get(kind, 0.0) * small for m in step.memory][:RANKS]
        if any(held):
            figure.add_bar(x=held, y=ranks, name=kind, orientation="h", marker_color=colour, row=1, col=2)
    figure.update_xaxes(title=f"a step, {unit}", col=1)
    figure.update_xaxes(title=f"at its fullest, {word}", col=2)
    figure.update_yaxes(autorange="reversed")
    return _look(figure, 130 + 26 * len(ranks), barmode="stack")


def timeline(step: Rehearsal) -> Any:
    """The schedule: a row for each rank, a box for each action; long steps show their start."""
    line = step.timeline
    scale, unit = _unit(line.seconds)
    most = max(8, ACTS // min(RANKS, len(line.spans)))
    rows = [(r, spans[:most]) for r, spans in enumerate(line.spans[:RANKS])]
    labels = [f"rank {r}" for r, _ in rows]
    figure = go.Figure()
    several = line.schedule.stages > line.schedule.ranks
    fits = max(len(spans) for _, spans in rows) <= 64
    for kind, colour in ACTIONS.items():
        found = [(labels[r], s) for r, spans in rows for s in spans if s.action.kind == kind]
        if not found:
            continue
        texts = [str(s.action) if several else f"{kind}{s.action.microbatch}" for _, s in found]
        figure.add_bar(
            y=[y for y, _ in found], x=[(s.end - s.start) * scale for _, s in found],
            base=[s.start * scale for _, s in found], orientation="h", name=WORDS[kind],
            text=texts if fits else None, textposition="inside", insidetextanchor="middle", textangle=0,
            marker={"color": colour, "line": {"color": "white", "width": 1 if fits else 0}},
            customdata=[[str(s.action), s.end * scale] for _, s in found],
            hovertemplate=f"%{{customdata[0]}}<br>%{{base:.4g}} to %{{customdata[1]:.4g}} {unit}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title=f"time, {unit}")
    figure.update_yaxes(categoryorder="array", categoryarray=labels, autorange="reversed")
    return _look(figure, 120 + 34 * len(rows), barmode="overlay")


def pareto(rows: Rows, front: Sequence[Plan], measured: Sequence[Measured | None]) -> Any:
    """Memory against time: the strategies, and the front of a search, where nothing is both faster and smaller."""
    plans = [*(p for _, p in rows), *front]
    scale, unit = _unit(max(p.seconds for p in plans))
    small, word = _bytes(max(p.memory for p in plans))
    figure = go.Figure()
    if front:
        known = sorted(front, key=lambda p: p.memory)
        figure.add_scatter(
            x=[p.memory * small for p in known], y=[p.seconds * scale for p in known], mode="lines+markers",
            name="Pareto front", line={"color": "#46a274", "shape": "hv"}, marker={"size": 8},
            text=[p.words for p in known],
            hovertemplate=f"%{{text}}<br>%{{x:.4g}} {word}, %{{y:.4g}} {unit}<extra></extra>",
        )  # fmt: skip
    places: dict[tuple[float, float], list[str]] = {}  # strategies that cost the same are one point
    for name, p in rows:
        places.setdefault((p.memory, p.seconds), []).append(name)
    texts = ["<br>".join(map(short, places.pop((p.memory, p.seconds), ()))) for _, p in rows]
    figure.add_scatter(
        x=[p.memory * small for _, p in rows], y=[p.seconds * scale for _, p in rows], mode="markers+text",
        name="predicted", text=texts, textposition="top center", textfont={"size": 11},
        marker={"size": 12, "color": "#3b7dd8", "line": {"color": "white", "width": 1.5}},
        customdata=[p.words for _, p in rows],
        hovertemplate=f"%{{customdata}}<br>%{{x:.4g}} {word}, %{{y:.4g}} {unit}<extra></extra>",
    )  # fmt: skip
    ran = [(n, m) for (n, _), m in zip(rows, measured) if m]
    if ran:
        figure.add_scatter(
            x=[m.peak * small for _, m in ran], y=[m.step * scale for _, m in ran], mode="markers", name="measured",
            marker={"size": 12, "symbol": "diamond", "color": "#111827"}, text=[n for n, _ in ran],
            hovertemplate=f"%{{text}} measured<br>%{{x:.4g}} {word}, %{{y:.4g}} {unit}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title=f"memory of the fullest rank, {word}", rangemode="tozero")
    figure.update_yaxes(title=f"a step, {unit}", rangemode="tozero")
    return _look(figure, 420)


def mesh(plan: Plan, most: int = 64) -> Any:
    """Devices by node, and those that device 0 talks to along each axis."""
    sizes, order, node = plan.option.sizes, plan.option.order, max(1, plan.hardware.node)
    count = min(plan.ranks, most)
    columns = min(node, count, 8)

    def at(device: int) -> tuple[float, float]:
        where, inside = divmod(device, node)
        across = max(1, 32 // columns)
        return (where % across) * (columns + 1) + inside % columns, -(
            (where // across) * (-(-min(node, count) // columns) + 0.8) + inside // columns
        )

    figure = go.Figure()
    strides, stride = {}, 1
    for axis in reversed(order):
        strides[axis], stride = stride, stride * sizes[axis]
    first, talks = set(range(count)) - {0}, []
    for axis in (a for a in order if sizes[a] > 1):
        peers = [d for d in (i * strides[axis] for i in range(1, sizes[axis])) if d < count]
        first -= set(peers)
        talks.append((axis, peers))
    groups = [("other devices", sorted(first), "#d5dae1"), ("device 0", [0], "#111827")]
    groups += [(f"{axis} peers of device 0 ({sizes[axis]})", peers, AXES[axis]) for axis, peers in talks]
    for name, devices, colour in groups:
        if devices:
            x, y = zip(*map(at, devices))
            figure.add_scatter(
                x=x, y=y, mode="markers+text", name=name, text=[str(d) for d in devices],
                textfont={"size": 10, "color": "white" if colour != "#d5dae1" else "#4b5563"},
                marker={"symbol": "square", "size": 28, "color": colour},
                hovertemplate="device %{text}<extra></extra>",
            )  # fmt: skip
    for where in range(-(-count // node)):
        inside = [at(d) for d in range(where * node, min(count, (where + 1) * node))]
        (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*inside))
        figure.add_shape(type="rect", x0=x0 - 0.5, x1=x1 + 0.5, y0=y0 - 0.42, y1=y1 + 0.42, line_color="#aab4bf",
                         line_width=1.2)  # fmt: skip
    depth = len({at(d)[1] for d in range(count)})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, range=[min(at(d)[1] for d in range(count)) - 0.8, 0.9])
    return _look(figure, 130 + 52 * depth)
