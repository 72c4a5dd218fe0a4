"""Saving: every rank writes what it owns into a working folder, and the first rank finishes it.

``torch.distributed.checkpoint`` is the format and its writer; its collectives are left out. A rank knows by itself
which parts are its to write, and the ranks tell each other through the folder that they have written, so that saving
can go on in a thread while the training's collectives run.
"""

import io
import math
import os
import pickle
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from autopar.checkpoint.folder import TRAINING, fault, is_step, prune, put, sign, token_of, working, write
from autopar.checkpoint.live import Live
from autopar.checkpoint.optimizer import PREFIX, collect, joined
from autopar.checkpoint.pieces import Stored
from autopar.errors import AutoparError

TIMEOUT = 1800.0  # seconds, as a process group's


class Saving:
    """A checkpoint that is being written. The process does not end before it is."""

    def __init__(self, path: Path, work: Callable[[], None], asynchronous: bool) -> None:
        self.path, self._work = path, work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}") if asynchronous else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: B036 - raised again by wait
            self._error = error

    def done(self) -> bool:
        """Whether this rank has nothing more to do."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; its folder.

        Raises:
            AutoparError: ``save-failed`` on every rank where one could not write, ``save-timeout``.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.path


def save(
    live: Live,
    folder: str | os.PathLike[str],
    optimizer: Optimizer | None,
    step: int | None,
    extra: Any,
    asynchronous: bool,
    keep: int | None,
    timeout: float = TIMEOUT,
) -> Saving:
    """See ``ParallelModule.save``."""
    path = Path(os.path.abspath(folder))
    what = f"save {path} step={step} keep={keep} asynchronous={asynchronous} optimizer={type(optimizer).__name__}"
    live.peers.meet(what)
    tensors, found = live.peers.agreed("save", lambda: _contents(live, path, optimizer, step, extra, keep))
    if optimizer is not None and live.across.stages:
        parts = live.peers.gather(found["optimizer"])
        found["optimizer"] = live.peers.agreed("save", lambda: joined(parts))
    rest = live.peers.agreed("save", lambda: _packed(found))
    token = live.peers.gather(secrets.token_hex(8))[0]
    if asynchronous:
        tensors = {name: t.staged() for name, t in tensors.items()}
    aliases = {name: p.tied for name, p in live.params.items()}
    job = _Job(path, token, live.peers.rank, live.peers.world, time.monotonic() + timeout)

    def work() -> None:
        job.write(tensors)
        if job.rank == 0:
            job.finish(rest, aliases, step)
            if keep is not None:
                prune(path.parent, keep)
        else:
            job.watch()

    return Saving(path, work, asynchronous)


def _contents(
    live: Live, path: Path, optimizer: Optimizer | None, step: int | None, extra: Any, keep: int | None
) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors by name, and everything else."""
    if keep is not None and (keep < 1 or not is_step(path)):
        fix = "save into step_folder(folder, step), and keep at least 1"
        raise AutoparError("bad-save", f"save: keep={keep} is for folders named step-N, not {path.name}", fix)
    tensors = live.stored()
    rest: dict[str, Any] = {"step": step, "extra": extra, "streams": None, "optimizer": None}
    if live.streams is not None:
        rest["streams"] = live.streams.state_dict()
    if optimizer is not None:
        collected = collect(optimizer, live)
        clash = [n for n in live.params if n.startswith(PREFIX)]
        if clash:
            why = f"{clash[0]}: names that begin with {PREFIX} are the optimizer's"
            raise AutoparError("name-clash", why, "rename the module")
        tensors |= collected.tensors
        rest["optimizer"] = collected.rest()
    meta = [n for n, t in tensors.items() if t.local.is_meta]
    if meta:
        raise AutoparError("meta-parameter", f"{meta[0]}: the shard is on the meta device and holds no data", None)
    return tensors, rest


def _packed(rest: Mapping[str, Any]) -> bytes:
    out = io.BytesIO()
    torch.save(dict(rest), out)
    try:
        torch.load(io.BytesIO(out.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))  # the rest is torch's advice, in colours, to load unsafely
        what = f"it has a {found[1]}" if found else re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()[0]
        why = f"save: extra, or an option of the optimizer, could not be loaded again: {what}"
        fix = "give numbers, text, tensors, and lists, tuples and dicts of them"
        raise AutoparError("bad-extra", why, fix) from error
    return out.getvalue()


class _Planner(DefaultSavePlanner):
    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.tensors[write_item.index.fqn].at(write_item.index)


class _Job:
    """One rank's part in writing one checkpoint. Nothing here is collective."""

    def __init__(self, path: Path, token: str, rank: int, world: int, deadline: float) -> None:
        self.path, self.token, self.rank, self.world, self.deadline = path, token, rank, world, deadline
        self.folder = working(path, token)

    def write(self, tensors: Mapping[str, Stored]) -> None:
        """Write this rank's parts, and say so, or why not."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            items = [item for name, t in tensors.items() for item in t.items(name)]
            writer = FileSystemWriter(self.folder)
            plan = writer.prepare_global_plan([SavePlan([])] * self.rank + [SavePlan(items)])[self.rank]
            results = writer.write_data(plan, _Planner(tensors)).value() if items else []
            write(self.folder / f".rank-{self.rank}", pickle.dumps((items, results)))
        except Exception as error:
            self._fail(error)
            raise self._failure(self.rank, f"{type(error).__name__}: {error}") from error

    def _fail(self, error: Exception) -> None:
        """Let the other ranks know; where the disk is the fault they find out by the timeout."""
        try:
            write(self.folder / f".failed-{self.rank}", f"{type(error).__name__}: {error}".encode())
        except OSError as other:
            error.add_note(f"the other ranks could not be told: {other}")

    def _failure(self, rank: int, why: object) -> AutoparError:
        fix = "see to the disk, then save again; the checkpoint before is untouched"
        return AutoparError("save-failed", f"save {self.path}: rank {rank} could not write: {why}", fix)

    def _wait(self, ready: Callable[[], bool], missing: Callable[[], str]) -> None:
        pause = 0.002
        while not ready():
            for path in sorted(self.folder.glob(".failed-*")):
                raise self._failure(int(path.name.split("-")[1]), path.read_text())
            if time.monotonic() > self.deadline:
                fix = "call save on every rank, on a file system that all of them see"
                raise AutoparError("save-timeout", f"save {self.path}: {missing()}", fix)
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def watch(self) -> None:
        """Wait until the first rank has finished the checkpoint."""
        self._wait(lambda: token_of(self.path) == self.token, lambda: "rank 0 has not finished it in time")

    def finish(self, rest: bytes, aliases: Mapping[str, tuple[str, ...]], step: int | None) -> None:
        """Once every rank has written: metadata, manifest, and the folder to its place."""
        marks = [self.folder / f".rank-{r}" for r in range(self.world)]
        absent = lambda: [r for r, m in enumerate(marks) if not m.exists()]  # noqa: E731
        self._wait(lambda: not absent(), lambda: f"ranks {absent()} have written nothing in time")
        try:
            told = [pickle.loads(m.read_bytes()) for m in marks]
            metadata, results = _metadata(told, aliases)
            FileSystemWriter(self.folder).finish(metadata, results)
            write(self.folder / TRAINING, rest)
            for mark in marks:
                mark.unlink()
            sign(self.folder, self.token, step)
            put(self.path, self.token)
        except Exception as error:
            if fault(self.path) is not None or token_of(self.path) != self.token:
                self._fail(error)
            raise self._failure(0, f"{type(error).__name__}: {error}") from error


def _metadata(
    told: list[tuple[list[WriteItem], list[WriteResult]]], aliases: Mapping[str, tuple[str, ...]]
) -> tuple[Metadata, list[list[WriteResult]]]:
    """What is where. Tied names stand for the same bytes."""
    _, metadata = create_default_global_save_plan([SavePlan(items) for items, _ in told])
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        assert sum(c.sizes.numel() for c in entry.chunks) == math.prod(entry.size), (name, entry)
    results = [found for _, found in told]
    for name, others in aliases.items():
        mine = [r for found in results for r in found if r.index.fqn == name]
        for other in others:
            metadata.state_dict_metadata[other] = metadata.state_dict_metadata[name]
            results.append([replace(r, index=replace(r.index, fqn=other)) for r in mine])
    return metadata, results
