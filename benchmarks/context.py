"""Attention of long sequences on two processes against one: time and peak memory, by ring and by Ulysses.

    python benchmarks/context.py --lengths 8192 16384 --backward-to 16384

One line for each length and way: milliseconds of the slowest rank (the least of ``--repeats``), the speed-up over one
process, and how far a rank's resident memory rose above what it held before. Every process has one thread.
"""

import argparse
import resource
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

from autopar.ir.layout import Layout, zigzag_shard
from autopar.ir.mesh import Mesh
from autopar.ir.runs import runs_of
from autopar.runtime.axis import axes_of
from autopar.runtime.collectives import all_to_all
from autopar.runtime.ring import ring_attention

HEADS, WIDTH = 4, 64


@dataclass(frozen=True)
class Task:
    """One measurement."""

    way: str  # "one", "ring" or "ulysses"
    length: int
    backward: bool
    repeats: int
    store: str

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return 1 if self.way == "one" else 2


def measure(rank: int, task: Task, answers: Any) -> None:
    """Body of one process: (seconds, bytes of peak memory above the start)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.store}", rank=rank, world_size=task.ranks)
    attend = _attention(task)
    q, k, v = (torch.randn(1, HEADS, task.length // task.ranks, WIDTH) for _ in range(3))
    before, times = _resident(), []
    for _ in range(task.repeats):
        leaves = [x.detach().requires_grad_(task.backward) for x in (q, k, v)]
        dist.barrier()
        start = time.perf_counter()
        out = attend(*leaves)
        if task.backward:
            out.backward(torch.ones_like(out))
        times.append(time.perf_counter() - start)
    answers.put((min(times), _resident() - before))
    dist.barrier()
    dist.destroy_process_group()


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _attention(task: Task) -> Any:
    if task.way == "one":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mesh = Mesh.of({"cp": 2})
    axis = axes_of(mesh, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))["cp"]
    if task.way == "ulysses":
        return lambda q, k, v: all_to_all(
            F.scaled_dot_product_attention(*(all_to_all(x, 2, 1, axis) for x in (q, k, v)), is_causal=True), 1, 2, axis
        )
    shard = zigzag_shard(0, task.length, 2)
    assert shard is not None
    held = tuple(runs_of(Layout.of({"cp": shard}), 0, task.length, mesh, {"cp": c}) for c in range(2))
    return lambda q, k, v: ring_attention(q, k, v, None, True, None, None, held[axis.coordinate], held, axis)


def run(task: Task) -> tuple[float, int]:
    """Seconds of the slowest rank and the largest rise of memory."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    multiprocessing.spawn(measure, (task, answers), nprocs=task.ranks)
    found = [answers.get() for _ in range(task.ranks)]
    return max(t for t, _ in found), max(m for _, m in found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--backward-to", type=int, default=16384, help="longest length with a backward")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    print(f"causal attention, {HEADS} heads of {WIDTH}, float32\n")
    print(f"{'tokens':>7} {'':9} {'way':8} {'ms':>8} {'speed-up':>9} {'MiB a rank':>11}")
    for length in args.lengths:
        for backward in (False, True)[: 2 if length <= args.backward_to else 1]:
            alone = 0.0
            for way in ("one", "ring", "ulysses"):
                with tempfile.TemporaryDirectory() as folder:
                    seconds, memory = run(Task(way, length, backward, args.repeats, f"{folder}/store"))
                alone = alone or seconds
                kind = "backward" if backward else "forward"
                row = f"{length:7} {kind:9} {way:8} {seconds * 1e3:8.0f} {alone / seconds:9.2f} {memory / 2**20:11.0f}"
                print(row, flush=True)


if __name__ == "__main__":
    main()
