"""State of a pipeline: each rank holds its stages', everything collective gives all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from tests.pipeline.models import batch, model
from tests.pipeline.play import rows
from tests.ranks import Ranks

FROM, TO = "pp=2,tp=2", ["pp=4", "pp=2,dp=2", "dp=2,tp=2"]
STRATEGY = {"pp=2,dp=2": "zero=3,microbatches=2"}


def parallel(mesh: str, seed: float = 0.0) -> tuple[Any, Any]:
    m = model("tied")
    with torch.no_grad():
        for p in m.parameters():
            p += seed
    pm = autopar.parallelize(m, mesh, kwargs=rows(batch("tied"), mesh), strategy=STRATEGY.get(mesh, "microbatches=2"))
    return pm, torch.optim.AdamW(pm.parameters(), lr=1e-2)


def step(pm: Any, opt: Any, mesh: str, seed: int) -> float:
    loss = float(pm.train_step(**rows(batch("tied", seed), mesh)))
    opt.step()
    opt.zero_grad()
    return loss


def saved(folder: Path) -> dict[str, Any]:
    """A step, a checkpoint, and the step after it."""
    pm, opt = parallel(FROM)
    step(pm, opt, FROM, 1)
    pm.save(folder / "all", opt, step=7)
    pm.export_safetensors(folder / "weights")
    whole = pm.full_state_dict()
    return {"whole": whole, "loss": step(pm, opt, FROM, 2), "params": pm.full_parameters()}


def resumed(folder: Path, mesh: str) -> dict[str, Any]:
    pm, opt = parallel(mesh, seed=0.5)
    found = pm.load(folder / "all", opt)
    return {"step": found["step"], "loss": step(pm, opt, mesh, 2), "params": pm.full_parameters()}


def loaded(folder: Path, mesh: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters from a folder of weights, and from an unsharded state dict."""
    with torch.device("meta"):
        hollow = model("tied")
    first = autopar.parallelize(hollow, mesh, kwargs=rows(batch("tied"), mesh), weights=folder / "weights")
    second, _ = parallel(mesh, seed=0.5)
    second.load_state_dict(first.full_parameters() | {"head.weight": first.full_parameters()["table.weight"]})
    second.load_state_dict(second.state_dict())
    return first.full_parameters(), second.full_parameters()


@pytest.fixture(scope="module")
def checkpoint(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("state")
    return folder, ranks.run(4, saved, folder, timeout=120.0)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-12)


def test_the_first_rank_gets_the_whole_state(checkpoint: tuple[Path, list[dict[str, Any]]]) -> None:
    whole, *others = (got["whole"] for got in checkpoint[1])
    assert list(whole) == list(model("tied").state_dict()) or set(whole) == set(model("tied").state_dict())
    assert others == [{}, {}, {}]


@pytest.mark.parametrize("mesh", [FROM, *TO])
def test_training_goes_on_elsewhere(ranks: Ranks, checkpoint: tuple[Path, list[dict[str, Any]]], mesh: str) -> None:
    folder, (want, *_) = checkpoint
    for got in ranks.run(4, resumed, folder, mesh, timeout=120.0):
        assert got["step"] == 7
        torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-9, atol=1e-12)
        equal(got["params"], want["params"])


@pytest.mark.parametrize("mesh", TO)
def test_weights_come_from_a_folder(ranks: Ranks, checkpoint: tuple[Path, list[dict[str, Any]]], mesh: str) -> None:
    folder, (want, *_) = checkpoint
    for first, second in ranks.run(4, loaded, folder, mesh, timeout=120.0):
        equal(first, {n: want["whole"][n] for n in first})
        equal(second, first)


def held() -> tuple[list[str], list[str]]:
    pm, _ = parallel("pp=4")
    return [n for n, _ in pm.named_parameters()], list(pm.state_dict())


def test_a_rank_holds_its_stages_alone(ranks: Ranks) -> None:
    names = [set(n) for n, _ in ranks.run(4, held)]
    assert set().union(*names) == {n for n, _ in model("tied").named_parameters()}
    assert all("table.weight" in n for n in (names[0], names[3])) and "table.weight" not in names[1] | names[2]
    assert not names[1] & names[2]
