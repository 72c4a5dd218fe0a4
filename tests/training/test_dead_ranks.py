"""A process that dies in a step, in a save or while others are idle: they end with an error that names it."""

import pathlib
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import AutoparError
from autopar.runtime import heartbeat
from autopar.runtime.heartbeat import PATIENCE, Heart, lost_peer
from tests.checkpoint.models import batch, fused, mine, parallel
from tests.ranks import Ranks
from tests.spawned import Spawned, mark

SHORT = 4.0  # seconds of patience


def stepping(folder: pathlib.Path, waits: int | None) -> None:
    """Steps for ever; rank ``waits`` stops inside the third, where its optimizer would be."""
    pm = autopar.parallelize(fused(), "dp=2,tp=2", kwargs=mine(batch("fused", 0), "dp=2,tp=2"), heartbeat=SHORT)
    for step in range(1000):
        pm.train_step(**mine(batch("fused", step % 4), "dp=2,tp=2"))
        if step == 2:
            mark(folder, "third")
            if dist.get_rank() == waits:
                time.sleep(60.0)


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_within_a_step(ranks: Ranks, victim: int, tmp_path: pathlib.Path) -> None:
    """The victim sleeps within its step while the others wait for it; rank 0 keeps the store as well."""
    group = Spawned(ranks.context, 4, tmp_path, stepping, tmp_path, victim)
    group.wait_for("third")
    group.kill(victim)
    check(group, victim)


def check(group: Spawned, victim: int) -> None:
    codes, texts = group.codes(), group.texts()
    assert codes == [-signal.SIGKILL if r == victim else 1 for r in range(len(codes))], texts
    for rank, text in enumerate(texts):
        if rank != victim:
            assert f"rank {victim} on host " in text and "[dead-rank]" in text, (rank, text)
    assert not any("AutoparError: rank" in t and f"rank {victim} on" not in t for t in texts)


def idle(folder: pathlib.Path) -> None:
    """Ranks 0 and 1 wait for each other, in a group of which the victim is no member; rank 3 does something else."""
    autopar.parallelize(fused(), "dp=4", kwargs=mine(batch("fused", 0), "dp=4"), heartbeat=SHORT)
    heartbeat.GRACE = SHORT
    pair = dist.new_group([0, 1])
    mark(folder, "idle")
    if dist.get_rank() == 0:
        dist.all_gather([torch.zeros(1) for _ in range(2)], torch.zeros(1), group=pair)
    time.sleep(60.0)


def test_killed_while_others_are_idle(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """Nothing fails in the others, so each is ended by its own watch."""
    group = Spawned(ranks.context, 4, tmp_path, idle, tmp_path)
    group.wait_for("idle")
    group.kill(2)
    check(group, 2)


def bare(folder: pathlib.Path) -> None:
    """Collectives of the user's own, which raise what c10d raises."""
    autopar.parallelize(fused(), "dp=3", kwargs=mine(batch("fused", 0, rows=6), "dp=3"), heartbeat=SHORT)
    mark(folder, "begun")
    while True:
        dist.barrier()


def test_killed_in_a_user_s_own_collective(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    group = Spawned(ranks.context, 3, tmp_path, bare, tmp_path)
    group.wait_for("begun")
    group.kill(1)
    check(group, 1)


def raising() -> None:
    pm = parallel("fused", "dp=3")
    heart = pm._heart
    heart.patience, heart.interval = SHORT, SHORT / 5
    if dist.get_rank() == 1:
        raise ValueError("no such file")
    pm.train_step(**mine(batch("fused", 0), "dp=3"))


def test_a_rank_that_raises_is_named_with_its_error(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    group = Spawned(ranks.context, 3, tmp_path, raising)
    codes, texts = group.codes(), group.texts()
    assert codes == [1, 1, 1], texts
    for rank in (0, 2):
        assert "rank 1 on host" in texts[rank] and "it ended with ValueError: no such file" in texts[rank], texts[rank]


def going(folder: pathlib.Path) -> None:
    """Rank 1 leaves in order, and later rank 0, which keeps the store; the others go on for longer than patience."""
    pm = parallel("fused", "dp=2,tp=2")
    heart = heartbeat._hearts[dist.group.WORLD]
    assert heart is pm._heart and heart.patience == PATIENCE
    heart.patience, heart.interval = SHORT, SHORT / 5
    rank = dist.get_rank()
    dist.barrier()
    time.sleep((3 - rank if rank else 4) * SHORT)
    mark(folder, "left")
    dist.destroy_process_group()
    raise SystemExit(0)


def test_leaving_in_order_is_no_death(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    group = Spawned(ranks.context, 4, tmp_path, going, tmp_path)
    assert group.codes() == [0] * 4, group.texts()
    assert group.texts() == [""] * 4


class Clock:
    """The store of two ranks, and the other's hand."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.heart = Heart(self.store, 0, {0: "a", 1: "b"}, lambda: True, 0.5)


@pytest.fixture
def clock() -> Any:
    found = Clock()
    yield found
    found.heart._leave()


def settled(heart: Heart) -> AutoparError | None:
    heart._settled.wait(20.0)
    heart._stop.set()
    return heart.verdict


def test_a_count_that_stands_still_is_a_death(clock: Clock) -> None:
    clock.store.set("beat/1", "7")
    error = settled(clock.heart)
    assert error is not None and error.slug == "dead-rank" and "rank 1 on host b" in str(error)
    assert clock.store.get("dead").decode().startswith("1 ")


def test_a_rank_that_has_not_begun_is_not_dead(clock: Clock) -> None:
    time.sleep(1.0)
    assert clock.heart.verdict is None


def test_a_rank_that_left_is_dead_to_those_that_wait(clock: Clock) -> None:
    clock.heart.entered = time.monotonic()
    clock.store.set("beat/1", "7")
    clock.store.set("left/1", "1")
    error = settled(clock.heart)
    assert error is not None and heartbeat.LEFT in error.message


def test_what_others_found_is_told(clock: Clock) -> None:
    clock.store.set("dead", "5 it ended with ValueError: no")
    error = settled(clock.heart)
    assert error is not None and error.message == "rank 5 on host unknown is dead: it ended with ValueError: no"


def test_leaving_waits_for_the_beat_that_is_under_way() -> None:
    begun = threading.Event()

    def alive() -> bool:
        begun.set()
        time.sleep(0.5)
        return True

    heart = Heart(dist.HashStore(), 0, {0: "a", 1: "b"}, alive, 0.5)
    assert begun.wait(20.0)
    heart._leave()
    assert not heart._thread.is_alive()


def test_only_lost_peers_are_explained(clock: Clock) -> None:
    text = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:38626"
    assert lost_peer(RuntimeError(text)) and not lost_peer(RuntimeError("shapes [2] and [3]"))
    silent = AutoparError("rank-silent", "save: another rank does not take part")
    silent.__cause__ = RuntimeError(text)
    assert lost_peer(silent) and not lost_peer(AutoparError("dead-rank", text))
    clock.store.set("beat/1", "7")
    with pytest.raises(AutoparError, match="dead-rank") as caught, heartbeat.guard(clock.heart):
        raise RuntimeError(text)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_patience_is_positive(ranks: Ranks) -> None:
    ranks.refused(2, "bad-heartbeat", impatient)


def impatient() -> None:
    autopar.parallelize(fused(), "dp=2", kwargs=mine(batch("fused", 0), "dp=2"), heartbeat=0.0)
