"""Predicted against published: time and memory errors of each file, rank correlation within model and size.

    python benchmarks/accuracy.py [--rows] [FILE.csv or FOLDER ...]

Rows are in benchmarks/data, each with its source; a file that holds no runs is named and passed by. One set of
parameters serves all (cost/hardware, cost/regime).
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from autopar.predict import Predictor

FOLDER = Path(__file__).parent / "data"
MPT = {  # mosaicml/llm-foundry scripts/train/yamls/pretrain @8c8dd48f7: layers, width, heads
    "MPT-125m": (12, 768, 12), "MPT-350m": (24, 1024, 16), "MPT-760m": (24, 1536, 12), "MPT-1b": (24, 2048, 16),
    "MPT-3b": (32, 2560, 20), "MPT-7b": (32, 4096, 32), "MPT-13b": (40, 5120, 40), "MPT-30b": (48, 7168, 64),
}  # fmt: skip


def rows_of(path: Path) -> list[dict[str, str]]:
    """The file's rows; MPT models get their architecture."""
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    if not rows or not {"model", "n_gpus", "iter_time_s"} <= rows[0].keys():
        return []
    for row in rows:
        if row["model"] in MPT:
            layers, hidden, heads = map(str, MPT[row["model"]])
            row.update(n_layers=layers, hidden=hidden, heads=heads, vocab="50368")
    return rows


def report(name: str, rows: list[dict[str, str]], found: list[dict[str, str]]) -> None:
    """Print one file's errors."""
    priced = [(r, f) for r, f in zip(rows, found) if not f["pred_error"]]
    print(f"{name}: {len(priced)} of {len(rows)} rows priced")
    for why in sorted({f["pred_error"] for f in found if f["pred_error"]}):
        print(f"    not priced: {why[:100]}")
    for what, seen, guess in (
        ("time", "iter_time_s", "pred_iter_time_s"),
        ("memory", "peak_mem_gb", "pred_peak_mem_gb"),
    ):
        pairs = [(float(f[guess]), float(r[seen])) for r, f in priced if r.get(seen)]
        if pairs:
            error = np.array([p / s - 1 for p, s in pairs])
            size = np.abs(error)
            print(
                f"    {what}: mean {size.mean():.1%}  median {np.median(size):.1%}  max {size.max():.1%}  "
                f"bias {np.median(error):+.1%}  ({len(pairs)} rows)"
            )
    groups = defaultdict(list)
    for r, f in priced:
        groups[r["model"], r["n_gpus"]].append((float(f["pred_iter_time_s"]), float(r["iter_time_s"])))
    ranks = [spearmanr(*zip(*g)).statistic for g in groups.values() if len(g) > 3]
    if ranks:
        print(f"    rank correlation within model and devices: mean {np.mean(ranks):.2f}, least {np.min(ranks):.2f}")


def main() -> None:
    """All files, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[FOLDER])
    parser.add_argument("--rows", action="store_true", help="print every row too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    predictor = Predictor()
    for path in (f for p in args.paths for f in (sorted(p.glob("*.csv")) if p.is_dir() else [p])):
        rows = rows_of(path)
        if not rows:
            print(f"{path.stem}: no rows of runs")
            continue
        found = [predictor.predict(r) for r in rows]
        report(path.stem, rows, found)
        if args.rows:
            for r, f in zip(rows, found):
                print(
                    "   ", r["id"], r["iter_time_s"], f["pred_iter_time_s"], r.get("peak_mem_gb"), f["pred_peak_mem_gb"]
                )


if __name__ == "__main__":
    main()
