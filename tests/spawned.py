"""Processes that a test may kill: each runs one function in a gloo group of its own, with its output in a file."""

import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Spawned:
    """Ranks of one group, whose store rank 0 keeps. ``folder`` takes their output and their marks."""

    def __init__(
        self, context: Any, world: int, folder: pathlib.Path, function: Callable[..., Any], *args: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, port = folder, _free_port()
        self.processes: list[multiprocessing.Process] = [
            context.Process(target=_begin, args=(rank, world, port, folder, function, args), daemon=True)
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait_for(self, mark: str, timeout: float = 90.0) -> None:
        """Until every rank that lives has made the mark."""
        end = time.monotonic() + timeout
        while not all((self.folder / f"{mark}-{r}").exists() for r in range(len(self.processes))):
            assert time.monotonic() < end, f"no {mark}: {self.texts()}"
            time.sleep(0.02)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    def codes(self, timeout: float = 60.0) -> list[int | None]:
        """Exit codes; None of a rank that did not end in time, which is killed."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        found = [p.exitcode for p in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return found

    def texts(self) -> list[str]:
        """What each rank wrote."""
        return [(self.folder / f"output-{r}").read_text() for r in range(len(self.processes))]


def mark(folder: pathlib.Path, name: str) -> None:
    """Tell the test how far this rank is."""
    (folder / f"{name}-{dist.get_rank()}").touch()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _begin(
    rank: int, world: int, port: int, folder: pathlib.Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with (folder / f"output-{rank}").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    function(*args)
    dist.barrier()
    dist.destroy_process_group()
