"""CPU seconds and peak memory from a model on the meta device to the emitted module of one rank, on one core.

    python benchmarks/compile.py

Seconds are CPU seconds of one thread. Each row is a process of its own on a mesh dp=8, tp=8 of which it is rank 0 (the
others are c10d's fake process group): of three, the one that a busy machine held up least.
Weights are on the meta device before and after. ``trace`` is all that is kept for the next time that the model is
called so: the copy without weights that is traced, its trace, and the garbage that both leave. ``passes`` are all
passes with their verification; ``functions`` is the generated code; ``parameters`` are DTensors, modules and all else,
Python's garbage collector included. ``engine`` is torch's engine that reduces gradients, which the first training step
makes: it is no part of the total. The last lines compare 126 layers with 8 of the same width, at last what is done once
a trace is there: passes, functions, parameters.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

MESH, WORLD, SEQUENCE = "dp=8,tp=8", 64, 2048
MODELS = (("llama3-8b", 32), ("llama3-70b", 80), ("llama3-405b", 126), ("llama3-405b", 8))
MOST_SECONDS, MOST_GIB = 20.0, 1.5  # for the 405b
RUNS = 3


def measure(name: str, layers: int) -> dict[str, float]:
    """One row, in this process."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    import autopar
    import autopar.compile
    import autopar.passes.planned
    import autopar.trace.blueprint
    from autopar.presets import configuration

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    values = {**configuration(name), "num_hidden_layers": layers}
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
        ids, labels = (torch.zeros(1, SEQUENCE, dtype=torch.int64) for _ in range(2))
    seconds: dict[str, float] = {}
    autopar.compile.Compiler._traced = timed(collected(autopar.compile.Compiler._traced), "trace", seconds)  # type: ignore[method-assign]
    autopar.trace.blueprint.blueprint = timed(autopar.trace.blueprint.blueprint, "trace", seconds)
    autopar.passes.planned.run = timed(autopar.passes.planned.run, "passes", seconds)
    start = time.process_time()
    batch = {"input_ids": ids, "labels": labels}
    module = autopar.parallelize(model, MESH, kwargs=batch, device="meta")
    made = time.process_time()
    (variant,) = module._compiler.variants.values()  # type: ignore[attr-defined]
    module._emit(variant)
    seconds["functions"] = time.process_time() - made
    seconds["total"] = time.process_time() - start
    done = time.process_time()
    module._engine.attach()
    seconds["engine"] = time.process_time() - done
    seconds["parameters"] = seconds["total"] - seconds["trace"] - seconds["passes"] - seconds["functions"]
    assert all(p.is_meta for p in module.parameters())
    return {**seconds, "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def collected(function: Callable[..., Any]) -> Callable[..., Any]:
    """With its own garbage collected, which would be charged to what comes next."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        gc.collect()
        return out

    return run


def timed(function: Callable[..., Any], name: str, into: dict[str, float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        out = function(*args, **kwargs)
        into[name] = into.get(name, 0.0) + time.process_time() - start
        return out

    return run


def in_process(name: str, layers: int) -> dict[str, float]:
    """The row of a fresh process on one core."""
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, __file__, "--row", name, str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(done.stderr)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds and memory of compiling")
    parser.add_argument(
        "--row", nargs=2, metavar=("MODEL", "LAYERS"), help="measure one model in this process, print JSON"
    )
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row[0], int(options.row[1]))))
        return
    parts = ("trace", "passes", "functions", "parameters", "total", "engine")
    table = Table("model", "layers", *(f"{p}, s" for p in parts), "peak, GiB")
    rows = {}
    for name, layers in MODELS:
        runs = [in_process(name, layers) for _ in range(RUNS)]
        row = rows[name, layers] = min(runs, key=lambda r: r["total"] - r["trace"])
        table.add_row(name, str(layers), *(f"{row[p]:.2f}" for p in parts), f"{row['GiB']:.2f}")
    Console(width=120).print(table)
    deep, flat = rows["llama3-405b", 126], rows["llama3-405b", 8]
    for row in (deep, flat):
        row["once traced"] = row["passes"] + row["functions"] + row["parameters"]
    for what in ("trace", "passes", "functions", "parameters", "engine", "once traced"):
        each = (deep[what] - flat[what]) / (126 - 8) * 1e3
        print(f"126 layers over 8, {what}: {deep[what] / flat[what]:.2f}, {each:.2f} ms a layer")
    ok = deep["total"] <= MOST_SECONDS and deep["GiB"] <= MOST_GIB
    print(f"llama3-405b within {MOST_SECONDS:.0f} s and {MOST_GIB} GiB: {'yes' if ok else 'NO'}")
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
