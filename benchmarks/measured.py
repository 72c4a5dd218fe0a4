"""Predicted against measured on this machine: ten strategies of a small Llama on two gloo processes.

    python benchmarks/measured.py

Calibrates first: matmuls, attention, memory and collectives of this machine as a profile, with both processes busy. The
same profile prices every strategy and chooses its layouts. Peak bytes of the fullest rank are those that a dispatch
mode counts; a step is forward, backward and AdamW. Exit status 1 where a peak is off by more than 10%, a step by more
than 15%, or the rank correlation of the steps is below 0.8. Times mean nothing on a busy machine: ``--memory`` asks for
the bytes alone.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.calibrate import measure as calibrate
from autopar.calibrate import to_toml
from autopar.cli.arguments import split_axes
from autopar.cost.table import duration, size
from autopar.measure import Batch, Measured, measure
from autopar.planner import compare
from autopar.plans import Plan, closer, rehearsed

ROWS, TOKENS, VOCABULARY = 8, 256, 2048
BYTES, SECONDS, CORRELATION = 0.10, 0.15, 0.8
STRATEGIES = (
    "dp=2", "tp=2", "tp=2,sequence_parallel=true", "dp=2,zero=1", "dp=2,zero=2,microbatches=2", "dp=2,zero=3",
    "dp=2,recompute=full", "pp=2,microbatches=4,schedule=gpipe", "pp=2,microbatches=4,schedule=1f1b", "cp=2",
)  # fmt: skip


def made() -> tuple[nn.Module, Batch]:
    """The model, without weights, and its global batch."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return model, lambda step: {"input_ids": ids, "labels": ids.clone()}


def predicted(profile: str) -> list[tuple[str, Plan]]:
    """Each strategy's plan on two ranks of a profile."""
    model, batch = made()
    kwargs: dict[str, Any] = {k: v.to("meta") for k, v in batch(0).items()}
    asked = [(text, *split_axes(text)) for text in STRATEGIES]
    rows = compare(model, f"{profile}x2", (), kwargs, asked, batch=ROWS, sequence=TOKENS, precision="fp32")
    return [(n, closer(p, rehearsed(p))) for n, p in rows]


def report(rows: list[tuple[str, Plan, Measured]], times: bool) -> bool:
    """Print predicted beside measured; whether all bars hold."""
    table = Table("strategy", title="Llama of 8 M parameters, 8 rows of 256 tokens", title_justify="left")
    for name in ("step predicted", "measured", "error", "peak predicted", "measured", "error"):
        table.add_column(name, justify="right")
    good = True
    for name, plan, found in rows:
        slow, full = plan.seconds / found.step - 1, plan.memory / found.peak - 1
        good = good and abs(full) <= BYTES and (not times or abs(slow) <= SECONDS)
        table.add_row(
            name, duration(plan.seconds), duration(found.step), f"{slow:+.1%}", size(plan.memory), size(found.peak),
            f"{full:+.1%}",
        )  # fmt: skip
    Console(width=160).print(table)
    steps = [p.seconds for _, p, _ in rows], [m.step for _, _, m in rows]
    correlation = float(spearmanr(*steps).statistic)
    peaks = max(abs(p.memory / m.peak - 1) for _, p, m in rows)
    worst = max(abs(p.seconds / m.step - 1) for _, p, m in rows)
    print(f"largest errors: peak {peaks:.1%}, step {worst:.1%}; rank correlation of the steps {correlation:.2f}")
    return good and (not times or correlation >= CORRELATION)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="steps that are timed (default 9)")
    parser.add_argument("--memory", action="store_true", help="the bars of memory alone")
    parser.add_argument("--profile", help="a profile (FILE.toml) instead of calibrating")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        profile = options.profile or str(Path(folder) / "here.toml")
        if not options.profile:
            Path(profile).write_text(to_toml(calibrate(2), "measured by autopar calibrate"), encoding="utf-8")
        plans = predicted(profile)
        rows = []
        for name, plan in plans:
            text = f"{plan.strategy},hardware={profile}".strip(",")
            rows.append((name, plan, measure(made, plan.mesh, text, steps=1 if options.memory else options.steps)))
            print(f"{name}: {duration(plan.seconds)} and {duration(rows[-1][2].step)}", file=sys.stderr, flush=True)
    return 0 if report(rows, not options.memory) else 1


if __name__ == "__main__":
    sys.exit(main())
