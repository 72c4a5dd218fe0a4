"""This machine as a hardware profile: what its matmuls, attention, memory and collectives reach, measured."""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import spawn

from autopar.runtime._functional import exchanged, gathered, reduced, scattered
from autopar.runtime.axis import Axis

SQUARES = (64, 128, 256, 512, 1024)
MESSAGES = (2**14, 2**18, 2**22, 2**24)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Entry = tuple[float, str]


def seconds(work: Callable[[], object], least: float = 0.02) -> float:
    """Median seconds of a call, over at least three and ``least`` seconds."""
    work()
    times: list[float] = []
    while len(times) < 3 or sum(times) < least:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matmul() -> tuple[float, float, float]:
    """(peak flops per second, efficiency of a large matmul, half size): peak is the best rate seen, or the fit's limit.

    E and h of rate = peak · E · (d / (d + h))³ by least squares of logarithms over square matmuls.
    """
    rates = []
    for d in SQUARES:
        a, b = torch.randn(d, d), torch.randn(d, d)
        rates.append(2 * d**3 / seconds(lambda a=a, b=b: a @ b))  # type: ignore[misc]
    peak = max(rates)
    known = np.log(np.array(rates) / peak)
    sizes = np.array(SQUARES, float)
    halves = np.linspace(0, 256, 257)
    shapes = 3 * np.log(sizes / (sizes + halves[:, None]))
    offsets = (known - shapes).mean(axis=1)
    errors = ((known - shapes - offsets[:, None]) ** 2).sum(axis=1)
    best = int(errors.argmin())
    limit = peak * math.exp(offsets[best])
    return max(peak, limit), min(1.0, math.exp(offsets[best])), float(halves[best])


def dtypes() -> dict[str, float]:
    """The rate of each dtype's matmul over that of float32."""
    rates = {}
    for name in ("float32", "bfloat16", "float16", "float64"):
        a = torch.randn(256, 256).to(getattr(torch, name))
        rates[name] = 1 / seconds(lambda a=a: a @ a)  # type: ignore[misc]
    return {name: rate / rates["float32"] for name, rate in rates.items()}


def attention(peak: float) -> tuple[float, float]:
    """Share of ``peak`` that causal attention reaches, forward and backward, its square counted half."""
    q, k, v = (torch.randn(2, 8, 256, 64, requires_grad=True) for _ in range(3))
    flops = 2 * 2 * 8 * 256 * 256 * 128 / 2

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        forward().sum().backward()

    one = seconds(forward)
    two = max(seconds(both) - one, one)
    return min(1.0, flops / one / peak), min(1.0, 2.5 * flops / two / peak)


def memory() -> float:
    """Bytes per second of eager ops, as a forward runs them: two tensors read, one written, and the results kept.

    Results that are kept lie in memory that is new to the process, which costs more than the copy itself. They are as
    large as the C library always asks the system for (``M_MMAP_THRESHOLD`` grows to 32 MiB, mallopt(3)): whether
    smaller ones are new depends on what the heap held before.
    """
    a, b, count = torch.randn(2**23), torch.randn(2**23), 3
    return 3 * a.nbytes * count / seconds(lambda: [a * b for _ in range(count)], 0.5)


def host() -> float:
    """Seconds of an op on almost nothing, with autograd: a third of its forward and backward."""
    x = torch.randn(8, requires_grad=True)
    count = 100

    def chain() -> None:
        y = x
        for _ in range(count):
            y = y * y
        y.sum().backward()

    return seconds(chain, 0.1) / count / 3


def _rank(rank: int, ranks: int, folder: str) -> None:
    """Collectives as an emitted step calls them, whose results are new tensors, on one rank of those that take part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    axis = Axis("ranks", ranks, rank, dist.distributed_c10d._get_default_group().group_name)
    rows = []
    for size in MESSAGES:
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
        share = [part.numel()] * ranks
        work: list[Callable[[], object]] = [
            lambda x=whole: reduced(x, axis),  # type: ignore[misc]
            lambda p=part: gathered(p, axis),  # type: ignore[misc]
            lambda x=whole: scattered(x, axis),  # type: ignore[misc]
            lambda x=whole, n=share: exchanged(x, axis, n, n),  # type: ignore[misc]
        ]
        rows.append([size, *(_repeated(w) for w in work)])
    if rank == 0:
        np.savetxt(Path(folder) / "times.txt", np.array(rows))
    dist.destroy_process_group()


def _repeated(work: Callable[[], object], times: int = 9) -> float:
    """Median seconds of a collective that all ranks begin together, in a number of calls that all know.

    Results are kept until the last, as a step keeps them.
    """
    found: list[float] = []
    kept: list[object] = []
    for _ in range(times + 2):
        dist.barrier()
        start = time.perf_counter()
        kept.append(work())
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def collectives(ranks: int = 2) -> dict[str, float]:
    """Rates and latency over gloo: bytes per second by collective, and seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(ranks, folder), nprocs=ranks)
        sizes, *measured = np.loadtxt(Path(folder) / "times.txt").T
    out = {}
    latencies = []
    for name, times in zip(COLLECTIVES, measured):
        rounds, parts = (2 if name == "all_reduce" else 1), (ranks if name == "all_to_all" else 1)
        sent = rounds * sizes * (ranks - 1) / ranks / parts
        slope = (times[-1] - times[0]) / (sent[-1] - sent[0])
        out[name] = 1 / max(slope, 1e-12)
        latencies.append(max(times[0] - slope * sent[0], 0.0) / (rounds * (ranks - 1)))
    return {**out, "other": out["all_gather"], "latency": float(np.mean(latencies))}


def measure(ranks: int = 2) -> dict[str, dict[str, Entry]]:
    """The numbers of a profile, (value, unit) by section and name, measured here with one thread."""
    torch.set_num_threads(1)
    peak, efficiency, half = matmul()
    forward, backward = attention(peak)
    wire = collectives(ranks)
    fast = max(rate for name, rate in wire.items() if name != "latency")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks / 2**30
    tier = {
        "bandwidth": (fast / 1e9, "GB/s"), "latency": (wire["latency"] * 1e6, "us"), "base": (0.0, "us"),
    }  # fmt: skip
    rates = {n: (rate / fast, "fraction") for n, rate in wire.items() if n != "latency"}
    return {
        "": {"node": (float(ranks), "ranks")},
        "peak": {n: (peak * share / 1e9, "GFLOP/s") for n, share in dtypes().items()},
        "memory": {
            "capacity": (total, "GiB"), "bandwidth": (memory() / 1e9, "GB/s"), "efficiency": (1.0, "fraction"),
        },
        "matmul": {"efficiency": (efficiency, "fraction"), "half": (half, "elements")},
        "attention": {"forward": (forward, "fraction"), "backward": (backward, "fraction")},
        "host": {"op": (host() * 1e6, "us"), "overlap": (0.0, "fraction")},
        "inner": tier, "inner.efficiency": rates, "outer": tier, "outer.efficiency": rates,
    }  # fmt: skip


def to_toml(found: Mapping[str, Mapping[str, Entry]], source: str) -> str:
    """A profile as text, every number with unit and source."""
    lines = []
    for section, entries in found.items():
        lines += [f"\n[{section}]"] if section else []
        lines += [
            f'{name} = {{ value = {value:.6g}, unit = "{unit}", source = "{source}" }}'
            for name, (value, unit) in entries.items()
        ]
    return "\n".join(lines).lstrip() + "\n"
