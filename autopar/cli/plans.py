"""Named plans side by side, as a table, json or csv."""

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from autopar.cost.table import csv_of, duration, size
from autopar.plans import Plan, first_of

Rows = Sequence[tuple[str, Plan]]


def record(name: str, plan: Plan) -> dict[str, Any]:
    """One plan as a flat dict: seconds, bytes."""
    o = plan.option
    return {
        "name": name, "mesh": plan.mesh, "strategy": plan.strategy, "rows": o.rows, "microbatches": o.microbatches,
        "step_seconds": o.seconds, "tokens_per_second_per_device": plan.tokens_per_second, "mfu": plan.mfu,
        "compute_seconds": o.compute, "bubble_seconds": o.bubble, "optimizer_seconds": o.optimizer,
        **{f"exposed_{a}_seconds": s for a, s in o.exposed.items()},
        **{f"{k}_bytes": b for k, b in o.memory.items()}, "peak_bytes": o.peak, "host_bytes": o.host, "fits": plan.fits,
        "priced_by": plan.priced_by,
    }  # fmt: skip


def plans_text(rows: Rows, format: str) -> str:
    """Rows as ``json`` or ``csv``; a column that one lacks is 0."""
    return text_of([record(name, plan) for name, plan in rows], format)


def text_of(records: Sequence[dict[str, Any]], format: str) -> str:
    """Flat dicts as ``json`` or ``csv``."""
    if format == "json":
        return json.dumps(list(records), indent=2) + "\n"
    return csv_of(records)


def plans_table(rows: Rows) -> Table:
    """A line for each plan; a star marks the fastest that fits, an exclamation mark what does not fit."""
    best = rows[first_of([p for _, p in rows])][1]
    axes = sorted({a for _, p in rows for a in p.option.exposed})
    kinds = list(dict.fromkeys(k for _, p in rows for k, v in p.option.memory.items() if v))
    table = Table(
        title="one step, and the fullest device", title_justify="left", title_style="bold", header_style="bold cyan"
    )
    table.add_column("name", overflow="fold")
    table.add_column("mesh and strategy", overflow="fold", min_width=26)
    heads = ("step", "tokens/s/device", "MFU", *(f"{a} exposed" for a in axes), "bubble", "memory", *kinds)
    for head in heads:
        table.add_column(head, justify="right")
    for name, p in rows:
        o = p.option
        star = " *" if p.fits and p.seconds == best.seconds else ""
        table.add_row(
            name, p.words, duration(p.seconds) + star, f"{p.tokens_per_second:,.0f}",
            f"{p.mfu:.1%}", *(duration(o.exposed.get(a, 0.0)) for a in axes), duration(o.bubble),
            size(p.memory) + ("" if p.fits else " !"), *(size(o.memory[k]) for k in kinds),
        )  # fmt: skip
    return table
