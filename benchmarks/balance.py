"""Stages of published shapes: the slowest stage over the mean one, at several pipeline depths.

    python benchmarks/balance.py

Every model is lowered without weights for tp=8, one row of 4096 tokens a microbatch, priced on an H100 and cut for 1F1B
with four microbatches a rank. ``best`` is the least possible slowest stage over the mean, by trying every cut, where
there are fewer than half a million. The mean itself is out of reach where one unit is longer (``longest unit``). Exit
status 1 where a cut is more than 2% above the best of all.
"""

import argparse
import sys
import time
from itertools import chain, combinations
from math import comb

import numpy as np
from rich.console import Console
from rich.table import Table

from autopar.cli import _lower
from autopar.cost import load
from autopar.cost.balance import Unit, balance
from autopar.cost.schedule import schedule
from autopar.cost.table import duration, size
from autopar.cost.timeline import simulate
from autopar.cost.units import units
from autopar.models import load as load_model

MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "deepseek-v3")
DEPTHS = (4, 8, 16)
TENSOR, TOKENS, FEW, ABOVE = 8, 4096, 500_000, 1.02


def priced(name: str) -> tuple[Unit, ...]:
    loaded = load_model(f"hf:{name}")
    batch = loaded.kwargs(1, TOKENS)
    program = _lower.lower(loaded.model, batch, f"tp={TENSOR}", {}, after="reshard", loss_only=True)
    return units(program, load("h100"))


def least(seconds: list[float], stages: int) -> float | None:
    """The least slowest stage of all cuts; None where they are too many to try."""
    inner = range(1, len(seconds))
    count = comb(len(inner), stages - 1)
    if count > FEW:
        return None
    flat = np.fromiter(chain.from_iterable(combinations(inner, stages - 1)), np.int64, count * (stages - 1))
    cuts = np.pad(flat.reshape(count, stages - 1), ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(seconds))))
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    return float(np.diff(total[cuts], axis=1).max(axis=1).min())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help=f"presets (default {' '.join(MODELS)})")
    options = parser.parse_args()
    table = Table(title=f"1F1B, tp={TENSOR}, a row of {TOKENS} tokens a microbatch, h100", title_justify="left")
    heads = ("pp", "units", "slowest", "slowest/mean", "best", "longest unit", "bubble", "memory", "found in")
    table.add_column("model")
    for head in heads:
        table.add_column(head, justify="right")
    good = True
    for name in options.models:
        chain_ = priced(name)
        seconds = [u.seconds for u in chain_]
        for depth in DEPTHS:
            begin = time.perf_counter()
            cut = balance(chain_, schedule("1f1b", depth, 1, 4 * depth))
            took, mean = time.perf_counter() - begin, sum(seconds) / depth
            best = least(seconds, depth)
            good = good and (best is None or cut.slowest_over_mean <= ABOVE * best / mean)
            bubble = simulate(cut.schedule, cut.times()).bubble
            known = f"{best / mean:.4f}" if best else "-"
            figures = (duration(max(cut.seconds)), f"{cut.slowest_over_mean:.4f}", known, f"{max(seconds) / mean:.2f}")
            held = (f"{bubble:.1%}", size(max(cut.bytes)), duration(took))
            table.add_row(name, str(depth), str(len(chain_)), *figures, *held)
    Console(width=120).print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
