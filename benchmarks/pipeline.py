"""Measured steps of a pipeline of two processes, against a simulation fed with what its parts take.

    python benchmarks/pipeline.py [--width 1024] [--rows 256] [--steps 5]

A chain of equal layers is run in the naive order (one microbatch), and by GPipe and 1F1B with several. In the
same run every forward and backward of a stage is timed, and messages of the size that crosses, alone. The table shows
the median step, the simulated one, and their ratio. Each process computes in one thread.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.cost.schedule import schedule
from autopar.cost.timeline import Times, simulate
from autopar.emit.stage import Stage

RANKS, DEPTH = 2, 8
RUNS = [("gpipe", 1), *((name, m) for name in ("gpipe", "1f1b") for m in (2, 4, 8))]
Seconds = dict[str, list[float]]


class Chain(nn.Module):
    """Equal layers and a mean of squares."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def timed(seconds: Seconds) -> None:
    """Note how long each forward and backward of a stage takes."""
    for name, kind in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
        plain = getattr(Stage, name)

        def run(self: Stage, *args: Any, _plain: Any = plain, _kind: str = kind, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = _plain(self, *args, **kwargs)
            seconds[_kind].append(time.perf_counter() - start)
            return out

        setattr(Stage, name, run)


def message(count: int, rank: int) -> float:
    """Seconds of a message of ``count`` floats: half of its way there and back."""
    x, found = torch.zeros(count), []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(x, 1 - rank)
        found.append((time.perf_counter() - start) / 2)
    return statistics.median(found)


def work(rank: int, store: str, options: argparse.Namespace, answers: Any) -> None:
    """One rank: every run, its steps and its parts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    seconds: Seconds = defaultdict(list)
    timed(seconds)
    out = []
    for name, m in RUNS:
        torch.manual_seed(0)
        x = torch.randn(options.rows * m, options.width)
        strategy = autopar.Strategy(schedule=name, microbatches=m)
        pm = autopar.parallelize(Chain(options.width), f"pp={RANKS}", args=(x,), strategy=strategy)
        steps = []
        for step in range(options.steps + 1):
            seconds.clear()
            dist.barrier()
            start = time.perf_counter()
            pm.train_step(x)
            steps.append(time.perf_counter() - start)
            pm.zero_grad()
            if step == 0:
                found: Seconds = defaultdict(list)
            else:
                for kind, values in seconds.items():
                    found[kind] += values
        parts = {kind: statistics.median(values) for kind, values in found.items()}
        out.append((name, m, statistics.median(steps[1:]), parts, message(options.rows * options.width, rank)))
    answers.put((rank, out))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("width", 1024), ("rows", 256), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options, context = parser.parse_args(), multiprocessing.get_context("spawn")
    answers, store = context.Queue(), tempfile.mktemp()
    processes = [context.Process(target=work, args=(r, store, options, answers)) for r in range(RANKS)]
    for process in processes:
        process.start()
    found = dict(answers.get() for _ in processes)
    for process in processes:
        process.join()
    print("schedule  microbatches  measured  simulated  ratio")
    for mine, other in zip(found[0], found[1]):
        name, m, step = mine[0], mine[1], max(mine[2], other[2])
        forward, backward = ((mine[3][k], other[3][k]) for k in "FB")
        times = Times(forward, backward, (0.0, 0.0), ((mine[4], other[4]),))
        predicted = simulate(schedule(name, RANKS, 1, m), times).seconds
        print(f"{name:<9} {m:>12}  {step * 1e3:>6.1f} ms  {predicted * 1e3:>6.1f} ms  {step / predicted:>5.2f}")


if __name__ == "__main__":
    main()
