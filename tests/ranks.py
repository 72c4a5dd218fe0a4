"""Persistent gloo processes: each runs functions of test modules, every time in a process group of its own.

They are forked from one process that has torch and transformers loaded. A rank that gives no answer in time fails the
test by its name, and the processes are replaced.
"""

import multiprocessing
import pathlib
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError, AutoparWarning

LOADED = ["torch", "transformers.models.llama.modeling_llama", "torch.distributed.tensor", "autopar", "tests.ranks"]
AFTER_ERROR = 20.0  # seconds that the other ranks get once one has failed


@dataclass
class Answer:
    """What one rank gave: a value or an error, and the AutoparWarnings on the way."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    warnings: tuple[str, ...] = ()


class Ranks:
    """``size`` processes. ``run`` uses the first ``world`` of them."""

    def __init__(self, size: int, folder: pathlib.Path) -> None:
        self.size, self.folder = size, folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(LOADED)
        self.tasks = 0
        self.start()

    def start(self) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(self.size):
            mine, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def answers(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Answer]:
        """``function(*args)`` on ranks 0 to ``world`` - 1 of a gloo group; a hang fails the test."""
        self.tasks += 1
        store = self.folder / str(self.tasks)
        pipes, found = self.pipes[:world], {}
        for rank, pipe in enumerate(pipes):
            pipe.send_bytes(pickle.dumps((function, args, rank, world, store, timeout)))
        end = time.monotonic() + timeout
        while len(found) < world and time.monotonic() < end:
            for pipe in wait([p for p in pipes if p not in found], max(0.0, end - time.monotonic())):
                found[pipe] = _receive(pipe)
                if found[pipe].error is not None:
                    end = min(end, time.monotonic() + AFTER_ERROR)
        silent = [rank for rank, pipe in enumerate(pipes) if pipe not in found]
        dead = [rank for rank, pipe in enumerate(pipes) if pipe in found and isinstance(found[pipe].error, EOFError)]
        if silent or dead:
            self.stop()
            self.start()
            others = [f"rank {r}: {found[p].error!r}" for r, p in enumerate(pipes) if p in found]
            what = f"rank {dead} died" if dead else f"rank {silent} gave no answer in {timeout} s (a hang)"
            pytest.fail(f"{function.__name__}: {what}; {others}")
        return [found[pipe] for pipe in pipes]

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """The values of all ranks; an error on any rank fails the test, and so does a warning."""
        answers = self.answers(world, function, *args, timeout=timeout)
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                answer.error.add_note(f"on rank {rank}:\n{answer.trace}")
                raise answer.error
            assert not answer.warnings, f"rank {rank} warned: {answer.warnings}"
        return [a.value for a in answers]

    def refused(self, world: int, slug: str, function: Callable[..., Any], *args: Any) -> list[AutoparError]:
        """The errors of all ranks, each of which must be an AutoparError of ``slug``."""
        out = []
        for rank, answer in enumerate(self.answers(world, function, *args)):
            assert answer.error is not None, f"rank {rank} went on: {answer.value!r}"
            assert isinstance(answer.error, AutoparError), f"rank {rank}: {answer.trace}"
            assert answer.error.slug == slug, f"rank {rank}: {answer.error}"
            out.append(answer.error)
        return out


def _receive(pipe: Connection) -> Answer:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError as error:
        return Answer(error=error, trace="the process died")


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_perform(task))


def _perform(task: bytes) -> bytes:
    """The pickled Answer; what cannot be pickled becomes text."""
    answer = Answer()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        try:
            function, args, rank, world, store, timeout = pickle.loads(task)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()  # a rank that is done early must not leave while others still connect
            answer.value = function(*args)
        except BaseException as error:  # noqa: B036 - raised again in the test
            answer.error, answer.trace = error, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    answer.warnings = tuple(str(w.message) for w in heard if issubclass(w.category, AutoparWarning))
    try:
        return pickle.dumps(answer)
    except Exception:
        return pickle.dumps(Answer(error=RuntimeError(answer.trace or "the answer cannot be pickled")))
