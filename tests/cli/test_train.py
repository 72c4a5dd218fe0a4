"""``autopar train``: records, checkpoints, going on elsewhere, and what it refuses."""

import json
import pathlib
import shutil
import subprocess
import sys
import types

import pytest
import torch

from autopar.cli.journal import Journal
from autopar.cli.main import build, main
from autopar.cli.screen import Screen
from autopar.cli.text import Rows, read
from autopar.cli.train import _Run
from autopar.cost.hardware import of_device
from autopar.errors import AutoparError

ROOT = pathlib.Path(__file__).parents[2]
MODEL = "hf:llama-tiny"
LINES = "Prudence, indeed, will dictate that Governments long established should not be changed for light causes.\n"
OPTIONS = ["--steps", "6", "--batch", "4", "--seq", "16", "--lr", "1e-2", "--warmup", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(LINES * 8, encoding="utf-8")
    return path


def torchrun(text: pathlib.Path, out: pathlib.Path, *options: str) -> list[dict[str, float]]:
    """Two processes; the records on stdout."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "autopar", "train", MODEL, str(text), "--out", str(out), *OPTIONS, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def records(out: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_two_processes_and_on_other_meshes(
    text: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    want = torchrun(text, whole, "--mesh", "dp=2", "--strategy", "zero=3", "--save-every", "3", "--hardware", "h100")
    assert [r["step"] for r in want] == [1, 2, 3, 4, 5, 6] and records(whole) == want
    assert [r["tokens"] for r in want] == [64 * n for n in range(1, 7)]  # of the global batch, once
    assert all(r["mfu"] > 0 and r["tokens_per_second"] > 0 for r in want)
    assert want[1]["lr"] == 1e-2 and want[-1]["lr"] == pytest.approx(1e-3) and want[-1]["loss"] < want[0]["loss"]
    assert sorted(p.name for p in whole.iterdir()) == ["log.jsonl", "step-3", "step-6"]
    shutil.copytree(whole, again)
    shutil.rmtree(again / "step-6")
    found = torchrun(text, again, "--mesh", "tp=2", "--strategy", "sequence_parallel=true", "--resume")
    assert [r["step"] for r in found] == [4, 5, 6]
    for a, b in zip(records(again), want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["lr"] == b["lr"] and a["tokens"] == b["tokens"]
    shutil.rmtree(again / "step-6")
    staged = torchrun(text, again, "--mesh", "pp=2", "--strategy", "schedule=zero-bubble", "--resume")
    for a, b in zip(staged, want[3:], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["grad_norm"] == pytest.approx(b["grad_norm"], 1e-4)
    shutil.rmtree(again / "step-6")
    assert main(["train", MODEL, str(text), "--out", str(again), *OPTIONS, "--resume"]) == 0
    for a, b in zip(records(again), want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    capsys.readouterr()
    assert main(["train", MODEL, str(text), "--out", str(again), *OPTIONS, "--resume", "--steps", "5"]) == 0
    assert "nothing to train: step 6 is done" in capsys.readouterr().err and len(records(again)) == 6


def test_auto_on_two_processes_has_the_losses_of_one(
    text: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = torchrun(text, tmp_path / "two", "--strategy", "auto,microbatches=2", "--steps", "3")
    assert main(["train", MODEL, str(text), "--out", str(tmp_path / "one"), *OPTIONS, "--steps", "3"]) == 0
    want = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in want], rel=1e-4)


def refusal(text: pathlib.Path, out: pathlib.Path, *options: str, model: str = MODEL) -> str:
    with pytest.raises(AutoparError) as caught:
        args = build().parse_args(["train", model, str(text), "--out", str(out), *OPTIONS, *options])
        args.run(args, Screen())
    return caught.value.slug


def test_refusals(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert refusal(tmp_path / "none", tmp_path) == "unreadable-text"
    assert refusal(text, tmp_path, "--seq", "100000") == "short-text"
    assert refusal(text, tmp_path, "--batch", "3", "--mesh", "dp=2") == "indivisible-batch"
    assert refusal(text, tmp_path, "--mesh", "dp=2") == "bad-mesh"
    assert refusal(text, tmp_path, "--tokenizer", str(tmp_path)) == "unreadable-text"
    assert refusal(text, tmp_path, model="hf:bert-tiny") == "no-language-model"
    assert main(["train", MODEL, str(text), "--out", str(tmp_path / "run"), *OPTIONS, "--steps", "1"]) == 0
    assert refusal(text, tmp_path / "run") == "folder-exists"
    assert refusal(text, tmp_path / "run", "--resume", "--seed", "5") == "other-rows"


def test_half_precision_and_compilation(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = ["--precision", "bf16", "--log-every", "4", "--resume"]
    assert main(["train", MODEL, str(text), "--out", str(tmp_path), *OPTIONS, *options]) == 0
    assert [r["step"] for r in records(tmp_path)] == [4, 6]  # and the last
    assert "mfu" not in records(tmp_path)[0]


def test_the_rate_rises_and_falls() -> None:
    args = build().parse_args(["train", MODEL, "f", "--out", "o", "--steps", "110", "--warmup", "10", "--lr", "1.0"])
    run = types.SimpleNamespace(args=args)
    rates = [_Run.rate(run, step) for step in (1, 10, 60, 110)]  # type: ignore[arg-type]
    assert rates == pytest.approx([0.1, 1.0, 0.1 + 0.9 / 2, 0.1])


def test_a_pass_sees_every_row_once_and_the_position_says_all() -> None:
    rows = Rows(torch.arange(23), 2, seed=1)
    first, second = rows.take(11), rows.take(11)
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(0, 22, 2))
    assert first.tolist() != second.tolist()
    assert torch.equal(Rows(torch.arange(23), 2, seed=1, position=8).take(8), torch.cat([first, second])[8:16])


def test_a_tokenizer_s_folder(tmp_path: pathlib.Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    (tmp_path / "text").write_text("a b b c a")
    tokens, size = read(str(tmp_path / "text"), str(tmp_path / "words"))
    assert tokens.tolist() == [0, 1, 1, 2, 0] and size == 3


def test_records_of_steps_that_are_done_again_are_dropped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, float, int]] = []
    board = types.SimpleNamespace(add_scalar=lambda *a: drawn.append(a), close=lambda: None)
    monkeypatch.setattr("autopar.cli.journal._board", lambda folder, start: board)
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    journal = Journal(Screen(quiet=True), tmp_path, 2, 4, 64, None, 0.0)
    journal.step(3, {"loss": 1.5}, log=False)
    journal.step(4, {"loss": 1.0}, log=True)
    journal.close()
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 4] and ("loss", 1.0, 4) in drawn


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100-80g"), ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GB200", "gb200"), ("NVIDIA H100 PCIe", None), ("AMD Instinct MI300X", "mi300x"), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_the_profile_of_a_device(device: str, profile: str | None) -> None:
    assert of_device(device) == profile
