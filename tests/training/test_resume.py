"""Killed in the middle of a step, or of a save, and gone on from the last checkpoint, on other meshes too."""

import pathlib
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.checkpoint import save
from autopar.ir.mesh import Mesh
from autopar.runtime import heartbeat
from tests.checkpoint.models import MODELS, mine
from tests.ranks import Ranks
from tests.spawned import Spawned, mark

ROWS, TOKENS, WORDS = 8, 6, 24
FROM, TO = 10, 20  # the step that is saved, and the last one
SAVED = "dp=4 zero=3"


class Text:
    """Rows of a text in the order in which they stand; its position is saved with the model."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, WORDS, (ROWS * TOKENS * 2 * TO,), generator=torch.Generator().manual_seed(3))
        self.position = 0

    def batch(self, model: str) -> dict[str, torch.Tensor]:
        """The next global batch."""
        rows = self.tokens[self.position : self.position + ROWS * TOKENS].view(ROWS, TOKENS)
        self.position += ROWS * TOKENS
        return {"input_ids" if model == "llama" else "ids": rows, "labels": rows.roll(-1, 1)}


class Run:
    """A model, its optimizer with a schedule, and its text, on a mesh with a strategy: ``dp=4 zero=3``."""

    def __init__(self, model: str, where: str, seed: int, **options: Any) -> None:
        self.model, (self.mesh, _, strategy), self.text = model, where.partition(" "), Text()
        rows = mine(Text().batch(model), self.mesh)
        module = MODELS[model](seed=seed, **options)
        self.pm = autopar.parallelize(module, self.mesh, kwargs=rows, strategy=strategy, heartbeat=4.0)
        self.optimizer = torch.optim.AdamW(self.pm.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    def step(self) -> float:
        loss = self.pm.train_step(**mine(self.text.batch(self.model), self.mesh))
        self.pm.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return float(loss)

    def save(self, folder: pathlib.Path, step: int) -> None:
        extra = {"position": self.text.position, "schedule": self.schedule.state_dict()}
        self.pm.save(autopar.step_folder(folder, step), self.optimizer, step=step, extra=extra)

    def load(self, folder: pathlib.Path) -> int:
        told = self.pm.load(folder, self.optimizer)
        self.text.position = told["extra"]["position"]
        self.schedule.load_state_dict(told["extra"]["schedule"])
        step: int = told["step"]
        return step


def uninterrupted(model: str, where: str, options: dict[str, Any]) -> list[float]:
    run = Run(model, where, 0, **options)
    return [run.step() for _ in range(TO)]


def killed_in_a_step(model: str, where: str, folder: pathlib.Path, options: dict[str, Any]) -> None:
    """Saves after step 10; in step 11 the first parameters are already new when the process stops, for the test."""
    run = Run(model, where, 0, **options)
    for _ in range(FROM):
        run.step()
    run.save(folder, FROM)
    rows = mine(run.text.batch(model), run.mesh)
    run.pm.train_step(**rows)
    run.optimizer.param_groups[0]["params"] = run.optimizer.param_groups[0]["params"][:2]
    run.optimizer.step()
    mark(folder, "middle")
    run.pm.train_step(**rows)
    time.sleep(60.0)


def resumed(model: str, where: str, folder: pathlib.Path, options: dict[str, Any]) -> tuple[int, list[float]]:
    run = Run(model, where, 9, **options)
    step = run.load(folder)
    return step, [run.step() for _ in range(TO - step)]


CASES = [
    ("llama", {}, ["tp=2,dp=2 zero=1", "tp=1", "dp=4 zero=3"]),
    ("fused", {"dropout": 0.5}, ["dp=4 zero=3", "dp=4"]),  # masks follow the mesh, so it is the same
]  # fmt: skip


@pytest.mark.parametrize(("model", "options", "others"), CASES, ids=["model", "dropout"])
def test_killed_in_the_middle_of_a_step(
    ranks: Ranks, model: str, options: dict[str, Any], others: list[str], tmp_path: pathlib.Path
) -> None:
    want = ranks.run(4, uninterrupted, model, SAVED, options)[0]
    group = Spawned(ranks.context, 4, tmp_path, killed_in_a_step, model, SAVED, tmp_path, options)
    group.wait_for("middle")
    group.kill(*range(4))
    assert group.codes() == [-signal.SIGKILL] * 4, group.texts()
    for where in others:
        world = Mesh.parse(where.split()[0]).world
        for step, losses in ranks.run(world, resumed, model, where, tmp_path, options):
            assert step == FROM
            assert losses == pytest.approx(want[FROM:], rel=1e-5), where


def killed_in_a_save(folder: pathlib.Path) -> None:
    """Saves after step 5; in the save after step 10 the last rank has written half of its share when it dies."""
    run = Run("llama", SAVED, 0)
    for step in range(1, FROM + 1):
        run.step()
        if step == FROM // 2:
            run.save(folder, step)
    if dist.get_rank() == 3:
        save.write = lambda path, _: hold(path.with_name(f".part-{path.name}"), folder)
    else:
        heartbeat.GRACE = 1.0
        mark(folder, "half")
    run.save(folder, FROM)


def hold(part: pathlib.Path, folder: pathlib.Path) -> None:
    part.write_bytes(b"half")
    mark(folder, "half")
    time.sleep(60.0)


def test_killed_in_the_middle_of_a_save(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """The ranks that wait for the dead one's share end by themselves and say so."""
    group = Spawned(ranks.context, 4, tmp_path, killed_in_a_save, tmp_path)
    group.wait_for("half")
    group.kill(3)
    assert group.codes() == [1, 1, 1, -signal.SIGKILL], group.texts()
    assert all("rank 3 on host" in text and "[dead-rank]" in text for text in group.texts()[:3]), group.texts()
    left = [p for p in tmp_path.iterdir() if p.name.startswith(f".step-{FROM}.")]
    assert len(left) == 1 and list(left[0].glob("*.distcp")), list(tmp_path.iterdir())
    want = ranks.run(4, uninterrupted, "llama", SAVED, {})[0]
    for step, losses in ranks.run(4, resumed, "llama", "dp=2,tp=2 zero=1", tmp_path, {}):
        assert step == FROM // 2
        assert losses == pytest.approx(want[step:], rel=1e-5)
