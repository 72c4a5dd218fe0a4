"""Signs of life between processes: when one dies, the others end with an error that names it, and never hang.

A thread of each process counts up in a connection of its own to the c10d store and watches the count of the next rank;
the first that sees one stand still tells the others through the store. So a beat is a few small requests a rank,
whatever the world's size, and no step waits for it. A process that is alive but stuck is not noticed.

A collective that fails because of a lost peer (gloo's message has an address at most) is explained by the same thread,
which then looks at all ranks. A process that hangs in a collective with peers that live cannot be interrupted: once a
rank is known to be dead, it has some seconds to end by itself, and is ended then.
"""

import functools
import os
import re
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from autopar.errors import AutoparError

PATIENCE = 60.0  # seconds without a beat; long enough for a machine that swaps or a library that holds the interpreter
SUSPICION = 5  # beats that are missed by a dead rank once a collective has failed
GRACE = 10.0  # seconds that a process gets to end by itself
SIMULATED = ("fake", "threaded")  # backends whose ranks are no processes
LEFT = "it has left while others wait for it"
NETWORK = re.compile(r"gloo|nccl|\bucc\b|c10d|socket|connection|tcpstore", re.I)

P = ParamSpec("P")
T = TypeVar("T")
_hearts: "weakref.WeakKeyDictionary[dist.ProcessGroup, Heart]" = weakref.WeakKeyDictionary()


class Guarded(Protocol):
    """What has methods that need the other ranks."""

    _heart: "Heart | None"


S = TypeVar("S", bound=Guarded)


@dataclass
class Seen:
    """The last count that was read of a rank, and this process's own count when it changed."""

    count: bytes
    at: int


class Heart:
    """This process's sign of life, and its watch on the others'.

    Args:
        store: a connection of its own, under a name of its own.
        hosts: machine of every rank, by global rank.
        alive: whether the process group is still there.
        patience: seconds without a beat after which a rank is dead.
    """

    def __init__(
        self, store: Store, rank: int, hosts: Mapping[int, str], alive: Callable[[], bool], patience: float
    ) -> None:
        self.store, self.rank, self.hosts, self.alive, self.patience = store, rank, hosts, alive, patience
        self.interval = min(1.0, patience / SUSPICION)
        self.entered: float | None = None  # since when the main thread may be waiting for other ranks
        self.verdict: AutoparError | None = None
        ring = list(hosts)
        at = ring.index(rank)
        self._others = ring[at + 1 :] + ring[:at]
        self._watched = list(self._others)  # the first of them is watched, until it leaves
        self._seen: dict[int, Seen] = {}
        self._gone: tuple[int, float] | None = None  # a rank that left, and when
        self._lost: float | None = None  # since when the store has not answered
        self._count, self._suspicious = 0, 0  # beats so far, and those for which all ranks are looked at
        self._stop, self._settled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="autopar heartbeat", daemon=True)
        self._thread.start()
        # Unlike atexit's, these run in children of multiprocessing too.
        self._goodbye = Finalize(None, self._leave, exitpriority=1)

    def explain(self) -> AutoparError | None:
        """Why a collective failed: the error that names the dead rank; None where all seem alive. Takes some beats."""
        self._seen, self._suspicious = {}, SUSPICION + 3
        self._settled.wait(10 * self._suspicious * self.interval)
        if self.verdict is None:
            self._settled.clear()
        else:
            self._linger()
            self._stop.set()  # whoever asked ends the process as it likes
        return self.verdict

    def _linger(self) -> None:
        """Where the store may end with this process: give the others time to read in it who died."""
        if self.rank == 0:
            time.sleep(SUSPICION * self.interval)

    def _leave(self) -> None:
        """At the end of the process: a goodbye, or why it died; and what killed it where another rank did."""
        error = fatal()
        if error is not None and self.verdict is None and lost_peer(error) and (verdict := self.explain()) is not None:
            self._say(str(verdict))
        self._stop.set()
        # The interpreter aborts when it ends while the thread is inside the store.
        self._thread.join(GRACE)
        try:
            if error is not None and self.verdict is None:
                self._accuse(self.rank, f"it ended with {type(error).__name__}: {error}".splitlines()[0][:300])
                self._linger()
            self.store.set(f"left/{self.rank}", "1")
        except RuntimeError:
            self._lost = time.monotonic()  # the store has gone first: nobody is left to be told

    def _run(self) -> None:
        found = None
        while not self._stop.wait(self.interval):
            try:
                if not self.alive():
                    self.store.set(f"left/{self.rank}", "1")
                    self._goodbye.cancel()  # last: nothing waits for this thread any more
                    return
                self._look()
                self._lost = None
            except RuntimeError:  # of the store
                self._lost = self._lost or time.monotonic()
                if not self.alive():
                    self._goodbye.cancel()
                    return
            if self._lost is not None and self.verdict is None:
                self._judge_store(self._lost)
            if self._suspicious:
                self._suspicious -= 1
                if not self._suspicious and self.verdict is None:
                    self._settled.set()
            if self.verdict is not None:
                self._settled.set()
                if found is None and not self._suspicious:
                    self._say(str(self.verdict))
                found = found or time.monotonic()
                if time.monotonic() - found > GRACE:
                    self._end()

    def _look(self) -> None:
        self._count += 1
        self.store.set(f"beat/{self.rank}", str(self._count))
        if self.verdict is not None:
            return
        if self.store.check(["dead"]):
            rank, _, why = self.store.get("dead").decode().partition(" ")
            self.verdict = self._error(int(rank), why)
        elif self._suspicious:
            self._judge_all()
        elif self._watched:
            self._judge_next(self._watched[0])
        if self._gone and self._waits_since(self._gone[1]) > self.patience:
            self._accuse(self._gone[0], LEFT)

    def _judge_next(self, rank: int) -> None:
        silent = self._silence(rank)
        if self._has_left(rank):
            self._gone = self._gone or (rank, time.monotonic())
            self._watched.pop(0)
        elif silent > self.patience:
            self._accuse(rank, f"it has given no sign of life for {silent:.0f} s")

    def _judge_all(self) -> None:
        limit = min(self.patience, SUSPICION * self.interval)
        silent = [r for r in self._others if self._silence(r) > limit]
        dead = [r for r in silent if not self._has_left(r)]
        if dead:
            self._accuse(dead[0], "it gives no sign of life")
        elif silent:
            self._accuse(silent[0], LEFT)

    def _judge_store(self, since: float) -> None:
        if self._suspicious or self._waits_since(since) > SUSPICION * self.interval:
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            why = "the store, which torchrun keeps there," if agent else "the store, which that process keeps,"
            self.verdict = self._error(0, f"{why} does not answer")

    def _waits_since(self, then: float) -> float:
        """Seconds that the main thread may have been waiting in vain, if something happened ``then``."""
        return 0.0 if self.entered is None else time.monotonic() - max(self.entered, then)

    def _has_left(self, rank: int) -> bool:
        return self.store.check([f"left/{rank}"])

    def _silence(self, rank: int) -> float:
        """Seconds since the rank's count changed, by this process's own beats: on a machine that stalls all do."""
        count = self.store.get(f"beat/{rank}") if self.store.check([f"beat/{rank}"]) else b""
        seen = self._seen.setdefault(rank, Seen(count, self._count))
        if count != seen.count or not count:  # it has not begun
            seen.count, seen.at = count, self._count
        return (self._count - seen.at) * self.interval

    def _accuse(self, rank: int, why: str) -> None:
        self.verdict = self._error(rank, why)
        if not self.store.check(["dead"]):
            self.store.set("dead", f"{rank} {why}")

    def _error(self, rank: int, why: str) -> AutoparError:
        fix = "see its own output, then start again from the last checkpoint"
        if rank == self.rank:
            why = f"{why}; it is this process, which the others have given up"
        return AutoparError("dead-rank", f"rank {rank} on host {self.hosts.get(rank, 'unknown')} is dead: {why}", fix)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"autopar: {text}\n")
        sys.stderr.flush()

    def _end(self) -> None:
        self._say(f"rank {self.rank} hangs because of that, and is ended")
        os._exit(1)


def start(
    group: dist.ProcessGroup | None, ranks: tuple[int, ...], gather: Callable[[Any], list[Any]], patience: float | None
) -> Heart | None:
    """The heart of a group's processes, one for each group. Collective.

    Args:
        gather: a value of every rank, in the order of ``ranks``.
        patience: seconds without a sign of life after which a rank is dead; None for no heart.

    Returns:
        None where it is not wanted, and where ranks are no processes.

    Raises:
        AutoparError: ``bad-heartbeat`` where ``patience`` is not positive.
    """
    if patience is not None and patience <= 0:
        raise AutoparError("bad-heartbeat", f"heartbeat is {patience}", "seconds, or None for none")
    if patience is None or group is None or dist.get_backend(group) in SIMULATED:
        return None
    if group not in _hearts:
        told = gather((secrets.token_hex(8), socket.gethostname()))
        own: Any = dist.distributed_c10d._get_default_store()
        store = PrefixStore(f"autopar/{told[0][0]}", own.clone())
        known, here = weakref.ref(group), dist.distributed_c10d._world.pg_map
        hosts = {rank: host for rank, (_, host) in zip(ranks, told)}
        _hearts[group] = Heart(store, dist.get_rank(), hosts, lambda: known() in here, patience)
    return _hearts[group]


def fatal() -> BaseException | None:
    """What ends this process, if it is an error."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return (error.__context__ or error) if error.code else None
    return error


def lost_peer(error: BaseException) -> bool:
    """Whether a collective has failed: an error of c10d, or one that was caused by it."""
    if isinstance(error, AutoparError):
        return error.slug != "dead-rank" and error.__cause__ is not None and lost_peer(error.__cause__)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(NETWORK.search(str(error))))


@contextmanager
def guard(heart: Heart | None) -> Iterator[None]:
    """Around what needs other ranks: where a collective fails because one died, AutoparError ``dead-rank`` says so."""
    if heart is None:
        yield
        return
    outermost = heart.entered is None
    heart.entered = heart.entered or time.monotonic()
    try:
        yield
    except (RuntimeError, AutoparError) as error:
        verdict = heart.explain() if lost_peer(error) else None
        if verdict is None or (isinstance(error, AutoparError) and LEFT in verdict.message):
            raise  # a call that not every rank makes is told better by the caller
        raise verdict from error
    finally:
        if outermost:
            heart.entered = None


def guarded(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method under ``guard``."""

    @functools.wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with guard(self._heart):
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate[S, P], T], run)
