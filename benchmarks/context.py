"""Attention of long sequences on two processes against one: time and peak memory, by ring and by Ulysses.

    python benchmarks/context.py --lengths 8192 16384 32768 --backward-to 16384
    python benchmarks/context.py --million

One line for each length and way: milliseconds of the slowest rank (the least of ``--repeats``), the CPU seconds that it
took of them (on a busy machine look at these), the speed-ups of both over one process, how far a rank's resident memory
rose above what it held before, and the share of the causal mask's work that the busiest rank has, over the mean. Every
process has one thread; outputs and gradients are compared with those of one process. ``--million`` lowers Llama-3-8B
with a million tokens on cp=64,tp=8 and prints its largest values and the activations that are predicted for a rank.
"""

import argparse
import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor

from autopar.compile import lower
from autopar.cost.hardware import load as hardware
from autopar.cost.program import price
from autopar.ir.layout import Layout, plain_shard, zigzag_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Spec, specs
from autopar.ir.runs import Run, runs_of
from autopar.models import load
from autopar.runtime.axis import Axis, axes_of
from autopar.runtime.collectives import all_to_all
from autopar.runtime.ring import ring_attention
from autopar.runtime.tiles import Band, tiles

HEADS, WIDTH, WAYS = 4, 64, 2
TOLERANCE = 1e-4  # of the largest value, in float32
TOKENS = 2**20
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Task:
    """One measurement."""

    way: str  # "one", "ring", "contiguous" (a ring whose ranks hold one run each) or "ulysses"
    length: int
    backward: bool
    repeats: int
    store: str = ""

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return 1 if self.way == "one" else WAYS

    @property
    def held(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of the sequence that every rank holds."""
        shard = (zigzag_shard if self.way == "ring" else plain_shard)(0, self.length, WAYS)
        assert shard is not None
        mesh = Mesh.of({"cp": WAYS})
        return tuple(runs_of(Layout.of({"cp": shard}), 0, self.length, mesh, {"cp": c}) for c in range(WAYS))

    @property
    def imbalance(self) -> float:
        """Entries of the causal mask that the busiest rank computes, over the mean."""
        if self.way in ("one", "ulysses"):
            return 1.0
        found = [
            sum(
                t.query[1] * t.key[1] * (0.5 if t.diagonal else 1.0) for k in self.held for t in tiles(mine, k, Band(0))
            )
            for mine in self.held
        ]
        return max(found) * WAYS / sum(found)


def whole(length: int) -> tuple[Tensor, ...]:
    """Queries, keys, values and the gradient of the result."""
    made = torch.Generator().manual_seed(length)
    return tuple(torch.randn(1, HEADS, length, WIDTH, generator=made) for _ in range(4))


def measure(rank: int, task: Task, answers: Any) -> None:
    """Body of one process: seconds, CPU seconds, bytes of peak memory above the start, the largest error."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.store}", rank=rank, world_size=task.ranks)
    axis = None
    if task.ranks > 1:
        axis = axes_of(Mesh.of({"cp": WAYS}), dist.init_device_mesh("cpu", (WAYS,), mesh_dim_names=("cp",)))["cp"]
    runs = ((0, task.length),) if axis is None else task.held[rank]
    q, k, v, grad = (torch.cat([x.narrow(2, s, n) for s, n in runs], 2) for x in whole(task.length))
    CLEAR.write_text("5")  # the peak so far is forgotten: the whole tensors were here
    before, times = _kib("VmRSS"), []
    for _ in range(task.repeats):
        leaves = [x.detach().requires_grad_(task.backward) for x in (q, k, v)]
        dist.barrier()
        start = time.perf_counter(), time.process_time()
        out = _attend(task, axis, *leaves)
        if task.backward:
            out.backward(grad)
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    rise = (_kib("VmHWM") - before) * 1024
    found = [out.detach(), *(x.grad for x in leaves if x.grad is not None)]
    answers.put((*min(times), rise, _error(task, runs, found) if axis is not None else 0.0))
    dist.barrier()
    dist.destroy_process_group()


def _kib(field: str) -> int:
    """Resident memory of this process now (VmRSS) or at most (VmHWM), as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def _attend(task: Task, axis: Axis | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if axis is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if task.way == "ulysses":
        q, k, v = (all_to_all(x, 2, 1, axis) for x in (q, k, v))
        out: Tensor = all_to_all(F.scaled_dot_product_attention(q, k, v, is_causal=True), 1, 2, axis)
        return out
    return ring_attention(q, k, v, None, True, None, None, task.held[axis.coordinate], task.held, axis)


def _error(task: Task, runs: tuple[Run, ...], found: list[Tensor]) -> float:
    """The largest difference from one process, over the largest value, of the output and of each gradient."""
    q, k, v, grad = whole(task.length)
    leaves = [x.requires_grad_(task.backward) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    if task.backward:
        out.backward(grad)
    wanted = [out.detach(), *(x.grad for x in leaves if x.grad is not None)]
    mine = [torch.cat([x.narrow(2, s, n) for s, n in runs], 2) for x in wanted]
    return max(float((a - b).abs().max() / w.abs().max()) for a, b, w in zip(found, mine, wanted, strict=True))


def run(task: Task) -> tuple[float, ...]:
    """What the slowest, the busiest, the largest and the least exact rank say."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (replace(task, store=f"{folder}/store"), answers), nprocs=task.ranks)
    return tuple(map(max, zip(*(answers.get() for _ in range(task.ranks)))))


def million() -> None:
    """Print what a million tokens take on a rank."""
    loaded, seen = load("hf:llama3-8b"), dict[str, Program]()
    local = lower(
        loaded.model, (), loaded.kwargs(1, TOKENS), Mesh.parse("cp=64,tp=8"), "context_parallel=ring", loss_only=True,
        on_pass=lambda name, program: seen.__setitem__(name, program.clone()),
    )  # fmt: skip
    shapes = {s.shape for _, g in local.graphs() for n in g.nodes for s in specs(n) if isinstance(s, Spec)}
    print("llama3-8b, 1 row of 1,048,576 tokens, cp=64,tp=8, ring, float32")
    for shape in sorted(shapes, key=lambda s: -math.prod(s))[:3]:
        print(f"  of the largest values on a rank: {list(shape)}, {math.prod(shape) / TOKENS**2:.2e} of tokens squared")
    for what, size in price(seen["reshard"], hardware("h100")).memory.items():
        print(f"  {what:24} {float(size) / 2**30:8.2f} GiB a rank, predicted")


def table(lengths: list[int], backward_to: int, repeats: int) -> bool:
    """Print the lines; whether all ways agree with one process."""
    print(f"causal attention, {HEADS} heads of {WIDTH}, float32, {WAYS} processes\n")
    print("tokens           way           ms speed-up    CPU s speed-up  MiB a rank  busiest rank")
    exact = True
    for length in lengths:
        for backward in (False, True)[: 2 if length <= backward_to else 1]:
            alone = (0.0, 0.0)
            for way in ("one", "ring", "contiguous", "ulysses"):
                task = Task(way, length, backward, repeats)
                seconds, cpu, memory, error = run(task)
                alone = (seconds, cpu) if way == "one" else alone
                exact &= error < TOLERANCE
                kind = "backward" if backward else "forward"
                times = f"{seconds * 1e3:8.0f} {alone[0] / seconds:8.2f} {cpu:8.2f} {alone[1] / cpu:8.2f}"
                wrong = "" if error < TOLERANCE else f"  off by {error:.1e}"
                where = f"{length:6} {kind:9} {way:10}"
                print(f"{where} {times} {memory / 2**20:11.0f} {task.imbalance:13.2f}{wrong}", flush=True)
    return exact


def main() -> None:
    """Print the table, or what a million tokens take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--backward-to", type=int, default=16384, help="longest length with a backward")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--million", action="store_true", help="only lower a million tokens")
    args = parser.parse_args()
    if args.million:
        million()
    elif not table(args.lengths, args.backward_to, args.repeats):
        raise SystemExit("outputs or gradients differ from one process")


if __name__ == "__main__":
    main()
