"""Predicted beside measured: strategies that run on processes of this machine, as a table, json or csv."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from autopar.cli.plans import record
from autopar.cli.screen import Screen
from autopar.cost.table import duration, size
from autopar.errors import AutoparError
from autopar.measure import Batch, Measured, measure
from autopar.models import load
from autopar.plans import Plan


@dataclass(frozen=True)
class Pair:
    """A strategy's prediction and what was measured; None where it was not run, and ``why``."""

    name: str
    plan: Plan
    measured: Measured | None
    why: str = ""

    @property
    def errors(self) -> tuple[float, float] | None:
        """(time, bytes): predicted over measured, less 1."""
        found = self.measured
        return (self.plan.seconds / found.step - 1, self.plan.memory / found.peak - 1) if found else None


def made(text: str, rows: int, length: int, padding: bool) -> tuple[nn.Module, Batch]:
    """A model of the command line with weights, and its batch, the same in every process."""
    loaded = load(text, meta=False)
    inputs = loaded.padding if padding and loaded.padding else loaded.kwargs
    batch = inputs(rows, length)
    return loaded.model.train(), lambda step: batch


def run_all(
    plans: Sequence[tuple[str, Plan]], text: str, rows: int, length: int, *, padding: bool, precision: str, steps: int,
    processes: int | None, screen: Screen,
) -> list[Pair]:  # fmt: skip
    """Measure those that fit, one after the other.

    Args:
        rows: of the global batch. length: positions of a row. processes: most ranks; the machine's cores where None.
    """
    out = []
    for name, plan in plans:
        why = _too_large(plan, processes or os.cpu_count() or 1)
        measured = None
        if not why:
            extra = {"hardware": _profile(plan), "precision": "" if precision == "fp32" else precision}
            words = (plan.strategy, *(f"{k}={v}" for k, v in extra.items() if v))
            try:
                with screen.working(f"measuring {name}: {plan.ranks} processes"):
                    job = partial(made, text, rows, length, padding)
                    measured = measure(job, plan.mesh, ",".join(filter(None, words)), steps=steps)
            except AutoparError as error:
                why = str(error).splitlines()[0]
        if why:
            screen.say(f"not measured: {name}: {why}")
        out.append(Pair(name, plan, measured, why))
    return out


def _profile(plan: Plan) -> str:
    """The profile that chose the layouts, so that they are the same here; a file is named by its path."""
    name = plan.hardware.name
    return name if not Path(f"{name}.toml").is_file() else f"{name}.toml"


def _too_large(plan: Plan, processes: int) -> str:
    """Why a plan does not run here; empty where it does."""
    if plan.ranks > processes:
        return f"{plan.ranks} ranks, {processes} processes here (--processes)"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    whole = 2 * plan.option.memory["parameters"] * plan.option.sizes["tp"] * plan.option.sizes["pp"]
    wanted = plan.ranks * (plan.memory + whole)
    return f"needs {size(wanted)} here, {size(free)} is free" if wanted > free else ""


def records(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Each strategy as a flat dict: the prediction's columns, and the measured ones, None where it was not run."""
    out = []
    for p in pairs:
        found = p.measured
        out.append({
            **record(p.name, p.plan),
            "measured_step_seconds": found and found.step, "measured_peak_bytes": found and found.peak,
            "step_error": p.errors and p.errors[0], "peak_error": p.errors and p.errors[1],
            "measured_loss": found and found.losses[-1], "not_measured": p.why,
        })  # fmt: skip
    return out


def measured_table(pairs: Sequence[Pair]) -> Table:
    """A line for each strategy; a star marks the fastest that was measured."""
    fastest = min((p.measured.step for p in pairs if p.measured), default=0.0)
    table = Table(
        title="one step, and the fullest rank: predicted, and measured on this machine", title_justify="left",
        title_style="bold", header_style="bold cyan",
    )  # fmt: skip
    table.add_column("strategy", overflow="fold")
    for head in ("step predicted", "measured", "error", "memory predicted", "measured", "error"):
        table.add_column(head, justify="right", no_wrap=True)
    for p in pairs:
        found, errors = p.measured, p.errors
        star = " *" if found and found.step == fastest else ""
        known = p.plan.mesh in p.name
        name = p.name if known else f"{p.name}: {p.plan.words}"
        table.add_row(
            name, duration(p.plan.seconds), duration(found.step) + star if found else "not run",
            f"{errors[0]:+.0%}" if errors else "", size(p.plan.memory), size(found.peak) if found else "",
            f"{errors[1]:+.1%}" if errors else "",
        )  # fmt: skip
    return table
