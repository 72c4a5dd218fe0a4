"""CPU seconds, candidates and peak memory of full searches, and of the first answer of ``plan``, beside their bars.

    python benchmarks/plan.py [--presets NAME ...]

Each row is a process of its own with one thread: CPU seconds are what an idle core takes, however busy the machine is.
The first table is a search: ``import`` loads autopar, torch and transformers, ``model`` makes the model on the meta
device, ``trace`` exports and lowers it for every family, ``search`` prices all candidates and ranks them, ``lower``
lowers the first three and ranks them by their programs; the bar is for both together. The second is the command, from
the start of the process to its table, with nothing in the user's folder for caches: ``first`` with what came with
autopar, ``traced`` without. Exit status 1 where a bar is missed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

SEARCHES = (("llama3-70b", "h100x1024"), ("deepseek-v3", "h800x2048"))
PRESETS = ("llama3-8b", "llama3-405b", "gpt2", "t5-base", "mixtral-8x7b", "deepseek-v3")
CLUSTER = "h100x64"  # of a preset's first answer
SECONDS, EACH, GIB, FIRST = 10.0, 10e-6, 1.0, 5.0  # of a search, of a candidate, of memory, of a first answer
Row = dict[str, float]


def search(name: str, cluster: str) -> Row:
    """One full search, in this process: CPU seconds by part, candidates, peak bytes."""
    import torch

    import autopar
    from autopar import planner
    from autopar.models import load

    marks = {"import": time.process_time()}
    torch.set_num_threads(1)
    loaded = load(f"hf:{name}")
    loaded.model.train()
    kwargs = loaded.kwargs(2, loaded.sequence)
    marks["model"] = time.process_time()
    searched, relowered = planner.planned, planner.lowered

    def planned(*args: Any) -> Any:
        marks["trace"] = time.process_time()
        return searched(*args)

    def lowered(*args: Any) -> Any:
        marks["search"] = time.process_time()
        return relowered(*args)

    planner.planned, planner.lowered = planned, lowered
    plans = autopar.plan(loaded.model, cluster, (), kwargs)
    marks["lower"] = time.process_time()
    ends = list(marks.values())
    parts = {part: end - start for part, start, end in zip(marks, (0.0, *ends), ends)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**parts, "candidates": plans.found.count, "best": plans[0].seconds, "peak": peak}


def first(name: str, cluster: str, *more: str) -> Row:
    """The command ``plan`` as a user runs it: CPU and real seconds, peak bytes."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "autopar", "plan", f"hf:{name}", cluster, *more]
    subprocess.run(command, check=True, env=_alone(), capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": cpu, "real": time.perf_counter() - start, "peak": after.ru_maxrss * 1024}


def _alone() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "AUTOPAR_CACHE_DIR": ""}


def _row(name: str, cluster: str) -> Row:
    command = [sys.executable, __file__, "--row", name, cluster]
    done = subprocess.run(command, check=True, env=_alone(), stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _searches(console: Console) -> bool:
    table = Table(title="a full search, CPU seconds of one core", title_justify="left")
    parts = ("import", "model", "trace", "search", "lower")
    for head in ("model", "cluster", *parts, "candidates", "each", "peak"):
        table.add_column(head, justify="left" if head == "cluster" else "right")
    good = True
    for name, cluster in SEARCHES:
        r = _row(name, cluster)
        each = r["search"] / r["candidates"]
        good = good and r["search"] + r["lower"] <= SECONDS and each <= EACH and r["peak"] <= GIB * 2**30
        table.add_row(
            name, cluster, *(f"{r[p]:.1f}" for p in parts), f"{r['candidates']:,.0f}", f"{each * 1e6:.1f} µs",
            f"{r['peak'] / 2**30:.2f} GiB",
        )  # fmt: skip
    table.add_row(
        "bar", "", "", "", "", f"{SECONDS:.0f}", "both", "", f"{EACH * 1e6:.0f} µs", f"{GIB:.0f} GiB", style="dim"
    )
    console.print(table)
    return good


def _firsts(console: Console, names: list[str]) -> bool:
    table = Table(title=f"autopar plan hf:MODEL CLUSTER, start to answer (bar {FIRST:.0f} s)", title_justify="left")
    for head in (
        "model",
        "cluster",
        "first, CPU seconds",
        "real seconds",
        "bar",
        "traced, CPU seconds",
        "real seconds",
    ):
        table.add_column(head, justify="left" if head == "cluster" else "right")
    good = True
    rows = [(n, CLUSTER, FIRST) for n in names] + [(*SEARCHES[1], SECONDS)]
    for name, cluster, bar in rows:
        r, traced = first(name, cluster), first(name, cluster, "--fresh")
        good = good and r["cpu"] <= bar
        parts = (f"{r['cpu']:.1f}", f"{r['real']:.1f}", f"{bar:.0f}", f"{traced['cpu']:.1f}", f"{traced['real']:.1f}")
        table.add_row(name, cluster, *parts)
    console.print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=list(PRESETS), metavar="NAME", help="to ask first")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(search(*options.row)))
        return 0
    console = Console(width=140)
    good = [_searches(console), _firsts(console, options.presets)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
