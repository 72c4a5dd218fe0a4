"""Atomic folders, agreement of ranks, asynchronous saving: all ranks in one process, the small model by hand."""

import json
import pathlib
import shutil
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.checkpoint import folder, save
from autopar.checkpoint.folder import fault, latest, step_folder
from autopar.emit.module import ParallelModule
from autopar.emit.params import Place
from autopar.errors import AutoparError
from tests.checkpoint.models import agree, moments
from tests.emit.test_module import on_ranks
from tests.emit.tiny import batch, mine

PAIRS = [
    ("tp=1", "tp=2"), ("tp=2", "tp=1"), ("dp=2,tp=2", "dp=2,tp=4/2"), ("dp=2,tp=4/2", "tp=2"),
    ("ep=2,dp=2,tp=1", "dp=2,tp=2"), ("dp=2,tp=2", "ep=2,dp=2,tp=1"),
]  # fmt: skip


def trained(pm: ParallelModule, place: Place, seed: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
    pm.train_step(mine(batch(seed), place))
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def values(pm: ParallelModule, optimizer: Any) -> Any:
    return pm.full_parameters(), moments(pm, optimizer), float(pm.get_buffer("count"))


@pytest.mark.parametrize(("text", "other"), PAIRS)
def test_every_layout_there_and_back(text: str, other: str, tmp_path: pathlib.Path) -> None:
    def write(pm: ParallelModule, place: Place) -> Any:
        optimizer = trained(pm, place)
        pm.save(tmp_path / "c", optimizer)
        return values(pm, optimizer)

    def read(pm: ParallelModule, place: Place) -> Any:
        optimizer = trained(pm, place, 5)
        pm.load(tmp_path / "c", optimizer)
        return values(pm, optimizer)

    params, states, count = on_ranks(text, write)[0]
    for p, m, c in on_ranks(other, read):
        agree(p, params)
        agree(m, states)
        assert c == count == 1.0
    files = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert [f for f in files if not f.startswith("__")] == [".metadata", "autopar.json", "training.pt"]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


class Killed(BaseException):
    """A process that ends here."""


@pytest.mark.parametrize("at", ["sign", "put", "write data", "set aside"])
def test_what_was_not_finished_is_never_taken(at: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between files and manifest, between manifest and renaming, while writing, between two renamings."""

    def first(pm: ParallelModule, place: Place) -> Any:
        pm.save(step_folder(tmp_path, 1), step=1)
        return pm.full_parameters()

    def second(pm: ParallelModule, place: Place) -> None:
        trained(pm, place)
        with pytest.raises((Killed, AutoparError)):
            pm.save(step_folder(tmp_path, 1 if at == "set aside" else 2), step=2)

    def third(pm: ParallelModule, place: Place) -> Any:
        told = pm.load(step_folder(tmp_path, 1) if at == "set aside" else tmp_path)
        return told["step"], pm.full_parameters()

    def die(*_: Any) -> None:
        raise Killed

    want = on_ranks("tp=2", first)[0]
    monkeypatch.setattr(save.save, "__defaults__", (1.0,))
    renamed = pathlib.Path.replace
    if at == "write data":
        monkeypatch.setattr(save.FileSystemWriter, "write_data", die)
    elif at == "set aside":
        monkeypatch.setattr(
            pathlib.Path, "replace", lambda a, b: die() if b.name == "step-1" and a.is_dir() else renamed(a, b)
        )
    else:
        monkeypatch.setattr(save, at, die)
    on_ranks("tp=2", second)
    monkeypatch.undo()
    left = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert left, "the broken save left nothing: this test shows nothing"
    for step, params in on_ranks("tp=2", third):
        if at == "set aside":
            assert step == 2  # both are complete; the newer one counts
        else:
            assert step == 1
            agree(params, want)
    if at == "put":
        assert fault(folder.find(step_folder(tmp_path, 2))) is None  # whole, only not in its place
    elif at != "set aside":
        with pytest.raises(AutoparError, match="does not exist"):
            folder.find(step_folder(tmp_path, 2))


@pytest.mark.parametrize("harm", ["remove", "shorten", "change", "no manifest", "bad manifest"])
def test_a_damaged_folder_is_refused_and_the_one_before_is_used(harm: str, tmp_path: pathlib.Path) -> None:
    def write(pm: ParallelModule, place: Place) -> None:
        for step in (1, 2):
            pm.save(step_folder(tmp_path, step), step=step)

    on_ranks("tp=2", write)
    newest = step_folder(tmp_path, 2)
    assert latest(tmp_path) == newest
    data, small = next(newest.glob("*.distcp")), newest / "training.pt"
    if harm == "remove":
        data.unlink()
    elif harm == "shorten":
        data.write_bytes(data.read_bytes()[:-1])
    elif harm == "change":
        small.write_bytes(small.read_bytes()[:-1] + b"x")
    elif harm == "no manifest":
        (newest / "autopar.json").unlink()
    else:
        (newest / "autopar.json").write_text("{")
    assert latest(tmp_path) == step_folder(tmp_path, 1) and fault(newest)

    def read(pm: ParallelModule, place: Place) -> Any:
        with pytest.raises(AutoparError) as error:
            pm.load(newest)
        assert error.value.slug == "incomplete-checkpoint"
        return pm.load(tmp_path)["step"]

    assert on_ranks("tp=2", read) == [1, 1]
    with pytest.raises(AutoparError) as advised:
        folder.find(newest)
    assert str(step_folder(tmp_path, 1)) in str(advised.value.fix)
    shutil.rmtree(step_folder(tmp_path, 1))
    for place in (tmp_path, newest):
        with pytest.raises(AutoparError, match="step-2") as error:
            folder.find(place)
        assert error.value.fix == "load a checkpoint that was saved whole"


def test_a_series_keeps_the_newest(tmp_path: pathlib.Path) -> None:
    def write(pm: ParallelModule, place: Place) -> None:
        for step in (8, 9, 10, 11):
            pm.save(step_folder(tmp_path, step), step=step, keep=2)
        pm.save(step_folder(tmp_path, 11), step=12, keep=2)
        with pytest.raises(AutoparError, match="step-N"):
            pm.save(tmp_path / "other", keep=2)

    on_ranks("tp=2", write)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-11"]
    assert latest(tmp_path) == tmp_path / "step-11" and latest(tmp_path / "none") is None
    assert json.loads((tmp_path / "step-11" / "autopar.json").read_text())["step"] == 12


def test_asynchronous_saving_keeps_the_state_of_the_call(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, written = threading.Event(), save.FileSystemWriter.write_data

    def later(*args: Any) -> Any:
        go.wait(30.0)
        return written(*args)

    monkeypatch.setattr(save.FileSystemWriter, "write_data", later)

    def write(pm: ParallelModule, place: Place) -> Any:
        optimizer = trained(pm, place)
        want = values(pm, optimizer)
        extra = {"rows": torch.ones(2)}
        saving = pm.save(tmp_path / "c", optimizer, step=1, extra=extra, asynchronous=True)
        extra["rows"] += 1
        assert not saving.done() and not (tmp_path / "c").exists()
        for seed in (5, 6):
            pm.train_step(mine(batch(seed), place))
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        pm.full_parameters()
        go.set()
        assert saving.wait() == tmp_path / "c" and saving.done()
        return want

    def read(pm: ParallelModule, place: Place) -> Any:
        optimizer = torch.optim.AdamW(pm.parameters())
        told = pm.load(tmp_path / "c", optimizer)
        assert told["step"] == 1 and torch.equal(told["extra"]["rows"], torch.ones(2))
        assert optimizer.param_groups[0]["lr"] == 0.01
        return values(pm, optimizer)

    params, states, count = on_ranks("dp=2,tp=2", write)[0]
    for p, m, c in on_ranks("tp=2", read):
        agree(p, params)
        agree(m, states)
        assert c == count


def test_the_next_save_waits_and_errors_reach_every_rank(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = save.FileSystemWriter.write_data

    def full(self: Any, plan: Any, planner: Any) -> Any:
        if plan.storage_data.prefix == "__1_" and "broken" in str(self.path):
            raise OSError("no space left")
        return written(self, plan, planner)

    monkeypatch.setattr(save.FileSystemWriter, "write_data", full)

    def body(pm: ParallelModule, place: Place) -> str:
        pm.save(tmp_path / "broken", asynchronous=True)
        with pytest.raises(AutoparError, match="rank 1 could not write: OSError: no space left") as error:
            pm.save(tmp_path / "next")
        pm.save(tmp_path / "next", asynchronous=True)
        pm.load(tmp_path / "next")
        return error.value.slug

    assert on_ranks("tp=2", body) == ["save-failed", "save-failed"]
    assert not (tmp_path / "broken").exists() and fault(tmp_path / "next") is None


def test_a_rank_that_does_something_else_is_an_error_on_all(tmp_path: pathlib.Path) -> None:
    def apart(pm: ParallelModule, place: Place) -> str:
        with pytest.raises(AutoparError) as error:
            pm.save(tmp_path / ("a" if place.at["tp"] else "b"))
        return error.value.slug

    assert on_ranks("tp=2", apart) == ["rank-mismatch", "rank-mismatch"]

    def alone(pm: ParallelModule, place: Place) -> None:
        if place.at["tp"] == 0:
            pm.save(tmp_path / "c")

    with pytest.raises(AutoparError) as error:
        on_ranks("tp=2", alone)
    assert error.value.slug in ("rank-deadlock", "rank-silent")
    assert list(tmp_path.iterdir()) == []


def test_mismatches_are_listed_with_both_shapes_and_nothing_is_written(tmp_path: pathlib.Path) -> None:
    def write(pm: ParallelModule, place: Place) -> None:
        trained(pm, place)
        pm.save(tmp_path / "c")

    on_ranks("dp=2,tp=1", write)

    def read(pm: ParallelModule, place: Place) -> str:
        across, before = pm._across, pm.full_parameters()
        params = {n.replace("spare", "other"): p for n, p in across.params.items()}
        params["other"] = replace(params["other"], name="other")
        pm._skeleton.tables["other"] = pm._skeleton.tables["spare"]
        spec = replace(params["embed.weight"].spec, shape=(6, 8))
        params["embed.weight"] = replace(params["embed.weight"], spec=spec)
        pm._across = replace(across, params=params)
        with pytest.raises(AutoparError) as error:
            pm.load(tmp_path / "c")
        pm._across = across
        agree(pm.full_parameters(), before)
        assert error.value.slug == "state-dict-mismatch"
        return error.value.message

    for text in on_ranks("tp=2", read):
        assert "missing: other [3]" in text and "unexpected: spare [3]" in text
        assert "embed.weight: shape [8, 6] saved, [6, 8] in the model" in text
        assert "head.weight: shape [8, 6] saved, [6, 8] in the model" in text


def test_refusals(tmp_path: pathlib.Path) -> None:
    def body(pm: ParallelModule, place: Place) -> None:
        def refused(slug: str, call: Any, words: str = "") -> None:
            with pytest.raises(AutoparError) as error:
                call()
            assert error.value.slug == slug and words in error.value.message, error.value
            assert "\x1b" not in str(error.value)

        pm.save(tmp_path / "c")
        optimizer = trained(pm, place)
        refused("no-optimizer-state", lambda: pm.load(tmp_path / "c", optimizer))
        pm.save(tmp_path / "c", optimizer)
        fewer = torch.optim.AdamW([p for n, p in pm.named_parameters() if "gain" not in n])
        before = pm.full_parameters()
        refused("optimizer-mismatch", lambda: pm.load(tmp_path / "c", fewer), "the checkpoint's alone has")
        foreign = torch.optim.SGD([*pm.parameters(), torch.nn.Parameter(torch.ones(2))])
        refused("foreign-parameter", lambda: pm.save(tmp_path / "d", foreign))
        optimizer.state[next(pm.parameters())]["history"] = [torch.ones(1)]
        refused("optimizer-state", lambda: pm.save(tmp_path / "d", optimizer))
        for some in ([optimizer, fewer], (optimizer,), {"a": optimizer}):
            refused("bad-optimizer", lambda: pm.save(tmp_path / "d", some))  # noqa: B023
            refused("bad-optimizer", lambda: pm.load(tmp_path / "c", some))  # noqa: B023
        refused("bad-extra", lambda: pm.save(tmp_path / "d", extra=pathlib.PurePath("x")), "again: it has a pathlib.")
        refused("incomplete-checkpoint", lambda: pm.load(tmp_path / "d"))
        agree(pm.full_parameters(), before)
        assert not fewer.state

    on_ranks("tp=2", body)


def test_two_optimizers_with_a_folder_each(tmp_path: pathlib.Path) -> None:
    def two(pm: ParallelModule) -> list[torch.optim.Optimizer]:
        params = [p for p in pm.parameters() if p.requires_grad]
        return [torch.optim.AdamW(params[0::2], lr=0.01), torch.optim.SGD(params[1::2], lr=0.1, momentum=0.9)]

    def write(pm: ParallelModule, place: Place) -> Any:
        optimizers = two(pm)
        pm.train_step(mine(batch(0), place))
        for optimizer in optimizers:
            optimizer.step()
        for i, optimizer in enumerate(optimizers):
            pm.save(tmp_path / str(i), optimizer)
        return pm.full_parameters(), [moments(pm, o) for o in optimizers]

    def read(pm: ParallelModule, place: Place) -> Any:
        optimizers = two(pm)
        for i, optimizer in enumerate(optimizers):
            pm.load(tmp_path / str(i), optimizer)
        return pm.full_parameters(), [moments(pm, o) for o in optimizers]

    params, states = on_ranks("dp=2,tp=2", write)[0]
    for p, found in on_ranks("tp=2", read):
        agree(p, params)
        for got, want in zip(found, states, strict=True):
            agree(got, want)
