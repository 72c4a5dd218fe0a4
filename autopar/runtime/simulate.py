"""All ranks of a mesh in one process, one thread each, running the real per-rank code.

Collectives go through c10d's threaded process group, messages beside it. So sizes may differ between ranks, every rank
sees its own coordinates, and autograd functions run as they are. What threads share stays shared: parameters passed in,
and the default random generators, so random code takes its own.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.runtime import _mail
from autopar.runtime.axis import device_mesh_of

T = TypeVar("T")


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The DeviceMesh of ``mesh``, sub-axes included, inside a function run by ``run_ranks``."""
    return device_mesh_of(mesh, "cpu")


def run_ranks(world: Mesh | int, function: Callable[[int], T], *, timeout: float = 600.0) -> list[T]:
    """``function(rank)`` of every rank, each in a thread that has a default process group of them all.

    Grad mode and inference mode are the caller's. A process group that the caller has is set aside and put back.

    Args:
        world: the mesh, or the number of ranks.
        timeout: seconds after which ranks that still run are stopped.

    Raises:
        AutoparError: ``rank-deadlock`` where all that run wait for others, ``rank-timeout``.
        Exception: the first that a rank raised, with a note that names the rank; all ranks are stopped.
    """
    run: _Run[T] = _Run(world if isinstance(world, int) else world.world, timeout)
    with _threaded_world():
        threads = [threading.Thread(target=run.rank, args=(r, function), daemon=True) for r in range(run.world)]
        for thread in threads:
            thread.start()
        run.watch(threads)
    if run.failure is not None:
        raise run.failure
    return [run.results[r] for r in range(run.world)]


@contextmanager
def _threaded_world() -> Iterator[None]:
    hook, workers = sys.excepthook, torch.get_num_threads()
    c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threaded._install_threaded_pg()
    _mail.install()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        torch.set_num_threads(workers)
        sys.excepthook = hook


class _Run(Generic[T]):
    def __init__(self, world: int, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self.store = c10d.HashStore()
        self.results: dict[int, T] = {}
        self.failure: BaseException | None = None
        self.lock = threading.Lock()
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def rank(self, rank: int, function: Callable[[int], T]) -> None:
        """Body of one thread."""
        mine = dist.distributed_c10d._world
        try:
            limit = timedelta(seconds=self.timeout)
            dist.init_process_group("threaded", rank=rank, world_size=self.world, store=self.store, timeout=limit)
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
                self.results[rank] = function(rank)
        except SystemExit:
            pass  # how the threaded group leaves a collective that another rank's failure ended
        except BaseException as error:  # noqa: B036 - raised again in the caller
            self.fail(error, f"on rank {rank}")
        finally:
            # A thread that outlives the run must not touch the caller's own group.
            if dist.distributed_c10d._world is mine and dist.is_initialized():
                dist.destroy_process_group()

    def fail(self, error: BaseException, note: str) -> None:
        """Keep the first error and wake every rank that waits in a collective."""
        with self.lock:
            if self.failure is None:
                error.add_note(note)
                self.failure = error
        threaded.ProcessLocalGroup.exception_handle(error)

    def watch(self, threads: list[threading.Thread]) -> None:
        """Wait for the threads; stop them at the timeout, or where all of them wait for one another."""
        deadline, before = time.monotonic() + self.timeout, None
        while any(t.is_alive() for t in threads):
            for thread in threads:
                thread.join(0.05 if self.failure is None else 0.01)
            if self.failure is not None:
                self._open_barriers()
                if time.monotonic() > deadline:
                    return
                continue
            alive = [r for r, t in enumerate(threads) if t.is_alive()]
            waiting = self._waiting()
            if alive and waiting == before and sum(waiting.values()) == len(alive):
                self._stop("rank-deadlock", f"ranks {alive} wait in collectives that the others do not join")
            elif time.monotonic() > deadline:
                self._stop("rank-timeout", f"ranks {alive} still run after {self.timeout:g} s")
            if self.failure is not None:
                deadline = time.monotonic() + 5.0
            before = waiting

    def _stop(self, slug: str, message: str) -> None:
        self.fail(AutoparError(slug, message, "let every rank of a group issue the same collectives"), "simulated")

    @staticmethod
    def _waiting() -> dict[threaded.Collective, int]:
        pending = list(threaded.ProcessLocalGroup._cur_coll_on_pgs.values())
        return {c: c._count for c in pending if not c._done and c._count < c._world_size}

    def _open_barriers(self) -> None:
        """Let ranks out of the store barriers in which groups are made; the next collective ends them."""
        for key in self.store.list_keys():
            if "store_based_barrier_key" in key and not key.endswith(":last_worker"):
                self.store.set(f"{key}:last_worker", "1")
