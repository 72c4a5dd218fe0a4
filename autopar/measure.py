"""Steps that are run: a model under one strategy on processes of this machine, timed, and its bytes counted."""

import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.runtime.live import Live

Batch = Callable[[int], Mapping[str, Any]]
Make = Callable[[], tuple[nn.Module, Batch]]
START = "forkserver"  # processes are forked from one that has the libraries loaded and runs no threads
LOADED = ["torch", "torch.distributed.tensor", "transformers", "autopar.measure"]
COUNTED = 3
WARM = 2  # steps before any is timed: the first makes gradients and moments


@dataclass(frozen=True)
class Measured:
    """What the steps of a strategy took on this machine.

    Args:
        seconds: of each timed step, from all ranks' start to the last one's end.
        peaks: most bytes of tensors alive at once in a step, of each rank, the median of ``COUNTED`` steps.
        losses: the global loss of each step: ``WARM``, those that are timed, ``COUNTED``.
    """

    seconds: tuple[float, ...]
    peaks: tuple[int, ...]
    losses: tuple[float, ...]

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(self.peaks)


def measure(make: Make, mesh: str, strategy: str = "", *, steps: int = 5, lr: float = 1e-3) -> Measured:
    """Train on ``mesh``, one process with one thread a rank, over gloo: forward, backward, AdamW.

    Bytes are counted in ``COUNTED`` more steps behind the timed ones, since counting takes time, and their median is
    taken: gloo's threads let go of a message when they get to it, on a busy core late.

    Args:
        make: gives the model and, by number of the step, the global batch as keyword arguments; is called in every
            process, so it must be picklable and give the same everywhere. Dim 0 of each tensor are rows.
        strategy: fields of Strategy, as text. steps: that are timed, after ``WARM`` others.

    Raises:
        AutoparError: of a rank that refuses; ``bad-mesh``.
    """
    world = Mesh.parse(mesh).world
    with tempfile.TemporaryDirectory() as folder:
        context: Any = mp.get_context(START)
        context.set_forkserver_preload(LOADED)
        args = (world, folder, make, mesh, strategy, steps, lr)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        mp.start_processes(_rank, args, world, start_method=START)  # type: ignore[attr-defined]
        found = [pickle.loads((Path(folder) / str(r)).read_bytes()) for r in range(world)]
    for answer in found:
        if isinstance(answer, AutoparError):
            raise answer
    return Measured(found[0].seconds, tuple(p for a in found for p in a.peaks), found[0].losses)


def rows_of(batch: Mapping[str, Any], mesh: Mesh, rank: int) -> dict[str, Any]:
    """The rows of a global batch that a rank calls with."""
    cut, place = mesh.data_size, mesh.data_rank(mesh.coordinates(rank))
    return {k: v.tensor_split(cut)[place] if isinstance(v, Tensor) and v.ndim else v for k, v in batch.items()}


def _rank(rank: int, world: int, folder: str, make: Make, mesh: str, strategy: str, steps: int, lr: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        answer: Any = _train(rank, make, Mesh.parse(mesh), strategy, steps, lr)
    except AutoparError as error:
        answer = error
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(answer))
    if not isinstance(answer, AutoparError):
        dist.barrier()
    dist.destroy_process_group()


def _train(rank: int, make: Make, mesh: Mesh, strategy: str, steps: int, lr: float) -> Measured:
    model, batch = make()
    module = parallelize(model, str(mesh), kwargs=rows_of(batch(0), mesh, rank), strategy=strategy)
    del model
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, foreach=False)
    losses: list[float] = []

    def step(i: int) -> None:
        loss = module.train_step(**rows_of(batch(i), mesh, rank))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))

    seconds = []
    for i in range(WARM + steps):
        dist.barrier()
        start = time.perf_counter()
        step(i)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    peaks: list[int] = []
    for i in range(COUNTED):
        with Live(_states(module, optimizer)) as live:
            step(WARM + steps + i)
        peaks.append(live.peak)
    return Measured(tuple(seconds[WARM:]), (statistics.median_high(peaks),), tuple(losses))


def _states(module: nn.Module, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    """What lies in memory between two steps."""
    moments = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return [*module.parameters(), *module.buffers(), *moments]
