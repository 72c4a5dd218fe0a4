"""Saved on one mesh, loaded on another: parameters, moments, options, random stream and the next losses are equal."""

import os
import pathlib
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import autopar
from autopar.checkpoint import save
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from tests.checkpoint.models import MODELS, adamw, agree, batch, moments, parallel, train
from tests.ranks import Ranks

START, NEXT = range(2), range(2, 4)
OPTIMIZERS: dict[str, Any] = {
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "asgd": lambda ps: torch.optim.ASGD(ps),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(1e-2), amsgrad=True, foreach=False),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.5),
}


def state(pm: Any, optimizer: Any) -> Any:
    return pm.full_parameters(), moments(pm, optimizer), {n: b.clone() for n, b in pm.named_buffers()}


def begin(model: str, mesh: str, folder: pathlib.Path, options: dict[str, Any]) -> Any:
    """Two steps, a checkpoint, two steps more."""
    pm = parallel(model, mesh, **options)
    optimizer = adamw(pm)
    train(pm, optimizer, model, mesh, START)
    optimizer.param_groups[0]["lr"] = 5e-3
    pm.save(folder, optimizer, step=2, extra={"position": 2 * 4, "names": ("a", None)})
    return state(pm, optimizer), train(pm, optimizer, model, mesh, NEXT)


def go_on(model: str, mesh: str, folder: pathlib.Path, options: dict[str, Any]) -> list[Any]:
    """From the checkpoint, with an optimizer that has state and with one that has none and its groups reversed."""
    pm, out = parallel(model, mesh, seed=9, **options), []
    used, fresh = adamw(pm), adamw(pm)
    train(pm, used, model, mesh, range(7, 8))
    fresh.param_groups.reverse()
    for optimizer in (used, fresh):
        told = pm.load(folder, optimizer)
        assert told == {"step": 2, "extra": {"position": 8, "names": ("a", None)}, "folder": folder}
        assert sorted(g["lr"] for g in optimizer.param_groups) == [5e-3, 3e-2]
        out.append((state(pm, optimizer), train(pm, optimizer, model, mesh, NEXT)))
    return out


CHANGES = [
    ("llama", "dp=2,tp=2", ["tp=2", "dp=4", "tp=1"]), ("fused", "dp=2,tp=2", ["tp=2", "tp=1"]),
    ("fused", "tp=1", ["tp=4"]), ("fused", "tp=4", ["dp=2,tp=2"]),
    ("llama", "dp=4 zero=3", ["dp=2,tp=2 zero=1", "tp=1"]),
    ("fused", "dp=2,tp=2 zero=2", ["tp=2", "dp=2,tp=2 zero=3", "dp=4 zero=3,zero_shard_size=2"]),
]  # fmt: skip


def split(text: str) -> tuple[str, dict[str, Any]]:
    """Mesh and options of ``mesh strategy``."""
    mesh, _, strategy = text.partition(" ")
    return mesh, {"strategy": strategy}


@pytest.mark.parametrize(("model", "mesh", "others"), CHANGES)
def test_any_mesh_to_any_other(ranks: Ranks, model: str, mesh: str, others: list[str], tmp_path: pathlib.Path) -> None:
    mesh, options = split(mesh)
    before = ranks.run(Mesh.parse(mesh).world, begin, model, mesh, tmp_path / "c", options, timeout=120.0)
    (params, states, buffers), losses = before[0]
    assert any("exp_avg_sq" in n for n in states) and any(n.endswith("/step") for n in states)
    for text in others:
        other, options = split(text)
        for found in ranks.run(Mesh.parse(other).world, go_on, model, other, tmp_path / "c", options, timeout=120.0):
            for (p, m, b), after in found:
                agree(p, params)
                agree(m, states)
                agree(b, buffers)
                assert after == pytest.approx(losses, rel=1e-5, abs=1e-6)


def test_the_random_stream_continues(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    dropped = {"dropout": 0.5}
    losses = ranks.run(2, begin, "fused", "dp=2", tmp_path / "c", dropped)[0][1]
    for found in ranks.run(2, go_on, "fused", "dp=2", tmp_path / "c", dropped):
        assert [after for _, after in found] == [losses, losses]


@pytest.mark.parametrize("model", MODELS)
def test_readable_by_original_names_without_autopar(ranks: Ranks, model: str, tmp_path: pathlib.Path) -> None:
    params = ranks.run(4, begin, model, "dp=2,tp=2", tmp_path / "c", {})[0][0][0]
    found = {n: t.clone() for n, t in MODELS[model](seed=9).state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path / "c")
    tied = {"head.weight", "lm_head.weight"} & set(found)
    assert len(tied) == 1
    agree({n: t for n, t in found.items() if n not in tied and n != "calls"}, params)
    first = "embed.weight" if model == "fused" else "model.embed_tokens.weight"
    assert torch.equal(found[tied.pop()], params[first])
    pieces = [
        e for e in dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_data.items() if "/" not in e[0].fqn
    ]
    places = {(s.relative_path, s.offset) for _, s in pieces}
    assert len(places) < len(pieces)  # the tied name stands for the same bytes
    assert len({path for path, _ in places}) == 4  # every rank writes a share


def every_optimizer(mesh: str, folder: pathlib.Path, begins: bool) -> dict[str, Any]:
    pm, out = parallel("fused", mesh), {}
    pm.save(folder / "initial")
    for name, make in OPTIMIZERS.items():
        optimizer = make(pm.parameters())
        if begins:
            pm.load(folder / "initial")
            train(pm, optimizer, "fused", mesh, START)
            pm.save(folder / name, optimizer)
        else:
            pm.load(folder / name, optimizer)
        out[name] = moments(pm, optimizer), train(pm, optimizer, "fused", mesh, NEXT)
    return out


def test_other_optimizers(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    want = ranks.run(4, every_optimizer, "dp=2,tp=2", tmp_path, True, timeout=120.0)[0]
    for got in ranks.run(2, every_optimizer, "tp=2", tmp_path, False, timeout=120.0):
        for name in OPTIMIZERS:
            agree(got[name][0], want[name][0])
            assert got[name][1] == pytest.approx(want[name][1], rel=1e-4, abs=1e-5), name


def alone(folder: pathlib.Path, others_train: bool) -> None:
    pm = parallel("fused", "tp=2")
    if dist.get_rank() == 0:
        pm.save(folder)
    elif others_train:
        train(pm, adamw(pm), "fused", "tp=2", START)


def test_save_is_collective_and_says_so(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    for error in ranks.refused(2, "rank-mismatch", alone, tmp_path / "c", True):
        assert "ranks" in error.message
    first = ranks.answers(2, alone, tmp_path / "c", False)[0].error
    assert isinstance(first, AutoparError) and first.slug == "rank-silent" and "call save on every rank" in str(first)
    assert list(tmp_path.iterdir()) == []


def later(folder: pathlib.Path) -> Any:
    """Asynchronous, with the training's collectives in between."""
    pm = parallel("fused", "dp=2,tp=2")
    optimizer = adamw(pm)
    train(pm, optimizer, "fused", "dp=2,tp=2", START)
    want = state(pm, optimizer)
    saving = pm.save(folder, optimizer, step=2, asynchronous=True)
    train(pm, optimizer, "fused", "dp=2,tp=2", NEXT)
    assert saving.wait() == folder and saving.done()
    pm.load(folder, optimizer)
    return want, state(pm, optimizer)


def test_asynchronous_saving_between_processes(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    for want, got in ranks.run(4, later, tmp_path / "c", timeout=120.0):
        for a, b in zip(got, want):
            agree(a, b)


def killed(folder: pathlib.Path) -> None:
    """The process ends when the data of the second checkpoint is written and its manifest is not."""
    torch.set_num_threads(1)
    pm = parallel("fused", "tp=1")
    pm.save(autopar.step_folder(folder, 1), step=1)
    save.sign = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    pm.save(autopar.step_folder(folder, 2), step=2)


def test_killed_while_saving(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    process = ranks.context.Process(target=killed, args=(tmp_path,))
    process.start()
    process.join(60.0)
    assert process.exitcode == -signal.SIGKILL
    left = [p for p in tmp_path.iterdir() if p.name.startswith(".step-2.")]
    assert len(left) == 1 and list(left[0].glob("*.distcp"))
    assert autopar.latest(tmp_path) == tmp_path / "step-1"
    pm = parallel("fused", "tp=1")
    assert pm.load(tmp_path)["step"] == 1
    pm.save(autopar.step_folder(tmp_path, 2), step=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_one_process_without_groups(tmp_path: pathlib.Path) -> None:
    pm = parallel("fused", "tp=1")
    optimizer = adamw(pm)
    train(pm, optimizer, "fused", "tp=1", START)
    assert pm.save(tmp_path / "c", optimizer).wait() == tmp_path / "c"
    other = autopar.parallelize(MODELS["fused"](seed=9), "tp=1", kwargs=batch("fused", 0))
    after = adamw(other)
    assert other.load(tmp_path / "c", after)["step"] is None
    agree(dict(other.state_dict()), dict(pm.state_dict()))
    assert train(other, after, "fused", "tp=1", NEXT) == train(pm, optimizer, "fused", "tp=1", NEXT)
