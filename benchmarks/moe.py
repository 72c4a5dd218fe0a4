"""One layer of experts on two gloo processes: ep=2 against replicated experts (dp=2) and against tp=2.

    python benchmarks/moe.py

Flops, bytes sent and bytes of parameters of a rank are counted and must be what the closed forms in ``expected`` say;
exit status 1 where they are not. Step times stand beside them: on a CPU they say little about other devices. Then, in
one process, experts in one grouped product against a loop over them.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import autopar

WAYS = 2
ROWS, LENGTH, HIDDEN, INNER, EXPERTS, CHOICES = 4, 128, 256, 512, 8, 2
TOKENS = ROWS * LENGTH
STEPS = 7
KINDS = {
    "all_to_all_single": 1,
    "all_reduce": 2,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "allreduce_": 2,
}


class Experts(nn.Module):
    """Gated experts as a loop over those that were chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.05)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.05)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            token, place = torch.where(chosen == e)
            gate, up = F.linear(x[token], self.up[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[e])
            out.index_add_(0, token, y * weights[token, place, None])
        return out


class Layer(nn.Module):
    """A product, a router whose choices are spread evenly, and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:
        t = self.first(x).flatten(0, 1)
        scores = self.router(t).softmax(-1)
        chosen = (scores + favour.flatten(0, 1)).topk(CHOICES, -1).indices
        return self.experts(t, chosen, scores.gather(1, chosen)).view_as(x)


def inputs() -> tuple[Tensor, Tensor]:
    """Tokens, and what makes token j choose the experts j and j + 1: every expert is chosen as often on every rank."""
    x = torch.randn(ROWS, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    place = torch.arange(LENGTH)
    favour = F.one_hot(place % EXPERTS, EXPERTS) + F.one_hot((place + 1) % EXPERTS, EXPERTS)
    return x, 10.0 * favour.expand(ROWS, LENGTH, EXPERTS).contiguous()


@dataclass(frozen=True)
class Counts:
    """Of one rank and step: matmul flops, bytes sent by kind of traffic, bytes of parameters held."""

    flops: int
    exchanged: int
    summed: int
    held: int


class Meter(TorchDispatchMode):
    """Counts flops of products, and bytes that a rank sends by ring algorithms; integers are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.sent = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif "expert_grouped_mm" in str(packet):
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        name = packet.__name__
        if name in KINDS:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            sizes = [t.numel() * t.itemsize for t in tensors if t.is_floating_point() and t.dim()]
            kind = "exchanged" if name == "all_to_all_single" else "summed"
            self.sent[kind] += KINDS[name] * sum(sizes) * (WAYS - 1) // WAYS
        return out


def expected(mesh: str) -> Counts:
    """Closed forms, in fp32.

    Products: first, router, and TOKENS·CHOICES rows through an expert; the backward is twice the forward, less the
    gradient of the input. ep: 4 exchanges of a rank's chosen rows, and the sum of what is replicated. dp: the sum of
    all gradients. tp: sums of the output, of the gradients of tokens and of weights.
    """
    first, router, expert = HIDDEN * HIDDEN, HIDDEN * EXPERTS, 3 * HIDDEN * INNER
    forward = 2 * (TOKENS * (first + router) + TOKENS * CHOICES * expert)
    flops = 3 * forward - 2 * TOKENS * first
    rest, all_experts = 4 * (first + router), 4 * EXPERTS * expert
    share = (WAYS - 1) / WAYS
    if mesh == "dp=2":
        return Counts(flops // WAYS, 0, int(2 * (rest + all_experts) * share), rest + all_experts)
    if mesh == "ep=2":
        rows = 4 * TOKENS // WAYS * CHOICES * HIDDEN
        return Counts(flops // WAYS, int(4 * rows * share), int(2 * rest * share), rest + all_experts // WAYS)
    return Counts(0, 0, 0, 0)


def rank(place: int, store: str, results: Any) -> None:
    """One process: the counts and times of each mesh."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=place, world_size=WAYS)
    for mesh in ("dp=2", "ep=2", "tp=2"):
        given = [t.tensor_split(WAYS)[place] if mesh != "tp=2" else t for t in inputs()]
        pm = autopar.parallelize(Layer(), mesh, args=tuple(given), loss=lambda y: y.square().mean())
        pm.train_step(*given)
        with Meter() as meter:
            pm.train_step(*given)
        held = sum(4 * (p.to_local() if hasattr(p, "to_local") else p).numel() for p in pm.parameters())
        counts = Counts(meter.flops, meter.sent["exchanged"], meter.sent["summed"], held)
        times = []
        for _ in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            pm.train_step(*given)
            times.append(time.perf_counter() - start)
        results[place, mesh] = counts, statistics.median(times)
    dist.destroy_process_group()


def wrong(found: dict[tuple[int, str], tuple[Counts, float]]) -> list[str]:
    """Where counts are not those of the closed forms. Experts over tp: half of them, and less compute than whole."""
    out = []
    for (place, mesh), (counts, _) in found.items():
        want = expected(mesh)
        if mesh == "tp=2":
            experts = 4 * 3 * EXPERTS * HIDDEN * INNER
            want = Counts(counts.flops, 0, counts.summed, counts.held)
            if counts.held > 4 * HIDDEN * (HIDDEN + EXPERTS) + experts // WAYS:
                out.append(f"rank {place}, {mesh}: {counts.held} bytes of parameters are more than half of the experts")
        if counts != want:
            out.append(f"rank {place}, {mesh}: {counts}, expected {want}")
    return out


def grouped_against_loop() -> tuple[float, float]:
    """Median seconds of forward and backward: the module's own loop, and the emitted grouped products."""
    given = inputs()
    layer = Layer()
    pm = autopar.parallelize(layer, "dp=1", args=given, loss=lambda y: y.square().mean())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(STEPS):
        for run, into in ((lambda: layer(*given).square().mean().backward(), times[0]),
                          (lambda: pm.train_step(*given), times[1])):  # fmt: skip
            start = time.perf_counter()
            run()
            into.append(time.perf_counter() - start)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def main() -> int:
    """Run, print, compare."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        mp.spawn(rank, (os.path.join(folder, "store"), results), nprocs=WAYS)
        found = dict(results)
    for (place, mesh), (counts, seconds) in sorted(found.items()):
        if place == 0:
            print(f"{mesh}: {counts.flops / 1e9:.3f} GFLOP, {counts.exchanged / 2**20:.2f} MiB exchanged, "
                  f"{counts.summed / 2**20:.2f} MiB in sums, {counts.held / 2**20:.2f} MiB of parameters, "
                  f"{seconds * 1e3:.1f} ms a step")  # fmt: skip
    loop, grouped = grouped_against_loop()
    print(f"one process, forward and backward: loop {loop * 1e3:.1f} ms, grouped {grouped * 1e3:.1f} ms")
    for line in wrong(found):
        print(line, file=sys.stderr)
    return 1 if wrong(found) else 0


if __name__ == "__main__":
    sys.exit(main())
