"""Strategies side by side: predicted compute, traffic and memory of each, as a table and as rows for json and csv."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from autopar.cost.price import BACKWARD, FORWARD, GRADIENT, Price

Rows = Sequence[tuple[str, Price]]


def comparison(rows: Rows) -> Table:
    """A table with one line a strategy, in the order given.

    Flops and bytes are those of one rank in a step. Seconds count every collective as exposed. A star marks the
    strategy with the shortest step, an exclamation mark a memory larger than the device's.
    """
    axes = sorted({t.axis for _, p in rows for t in p.traffic})
    best = min((p.step_seconds for _, p in rows), default=0)
    table = Table(title=_title(rows), title_justify="left")
    table.add_column("strategy")
    by_axis = [f"{axis} traffic" for axis in axes]
    for column in ("mesh", "TFLOP", "compute", *by_axis, "communication", "step", "memory", "states"):
        table.add_column(column, justify="right")
    for name, price in rows:
        table.add_row(*_cells(name, price, axes, best))
    return table


def traffic_table(price: Price) -> Table:
    """Every collective of one strategy: axis, kind, part of the step, calls, bytes and seconds."""
    table = Table(title=f"traffic of one rank a step, mesh {price.mesh or '1 rank'}", title_justify="left")
    for column in ("axis", "collective", "when"):
        table.add_column(column)
    for column in ("calls", "sent", "time"):
        table.add_column(column, justify="right")
    for t in price.traffic:
        table.add_row(t.axis, t.collective, t.when, str(t.calls), size(float(t.bytes)), duration(float(t.seconds)))
    return table


def record(name: str, price: Price) -> dict[str, Any]:
    """One strategy as a flat dict of numbers: bytes, seconds, flops, by column name."""
    out: dict[str, Any] = {
        "strategy": name,
        "hardware": price.hardware,
        "mesh": price.mesh,
        "ranks": int(price.ranks),
        "forward_flops": float(price.flops[0]),
        "backward_flops": float(price.flops[1]),
        "compute_seconds": float(sum(price.compute_seconds)),
        "communication_seconds": float(price.communication_seconds),
        "step_seconds": float(price.step_seconds),
        "mfu": float(price.mfu) if price.step_seconds else 0.0,
        "memory_bytes": float(price.memory_bytes),
    }
    for kind, held in price.memory.items():
        out[f"{kind}_bytes"] = float(held)
    for axis in sorted({t.axis for t in price.traffic}):
        for when in (FORWARD, BACKWARD, GRADIENT):
            out[f"{axis}_{when}_bytes"] = float(price.wire_bytes(axis, when))
    return out


def comparison_rows(rows: Rows) -> list[dict[str, Any]]:
    """``record`` of each strategy."""
    return [record(name, price) for name, price in rows]


def to_json(rows: Rows) -> str:
    """All strategies as a json list of ``record``, each with its collectives."""
    return json.dumps([{**record(n, p), "traffic": _collectives(p)} for n, p in rows], indent=2)


def to_csv(rows: Rows) -> str:
    """All strategies as csv, one line each; a column that a strategy lacks is 0."""
    return csv_of(comparison_rows(rows))


def csv_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as csv; a column that one lacks is 0."""
    columns = list(dict.fromkeys(key for r in records for key in r))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval=0, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def size(count: float) -> str:
    """Bytes in binary units: ``64.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds with a fitting unit: ``3.20 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.2f} µs" if seconds else "0"


def _collectives(price: Price) -> list[dict[str, Any]]:
    fields = ("axis", "collective", "when", "calls", "bytes", "seconds")
    return [{f: v if isinstance(v := getattr(t, f), str | int) else float(v) for f in fields} for t in price.traffic]


def _title(rows: Rows) -> str:
    on: Iterable[str] = dict.fromkeys(p.hardware for _, p in rows)
    return f"one rank, one step, on {', '.join(on)}"


def _cells(name: str, price: Price, axes: Sequence[str], best: Any) -> list[str]:
    states = sum(v for k, v in price.memory.items() if k not in ("activations", "workspace"))
    fits = float(price.memory_bytes) <= price.capacity
    return [
        name,
        price.mesh or "1 rank",
        f"{float(sum(price.flops)) / 1e12:.3g}",
        duration(float(sum(price.compute_seconds))),
        *(size(float(price.wire_bytes(axis))) for axis in axes),
        duration(float(price.communication_seconds)),
        duration(float(price.step_seconds)) + (" *" if price.step_seconds == best else ""),
        size(float(price.memory_bytes)) + ("" if fits else " !"),
        size(float(states)),
    ]
