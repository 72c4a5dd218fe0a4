"""What planning keeps of a model: the same answer without torch, and nothing else than what was written."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import models, shelf
from autopar.cli.main import main
from autopar.cli.screen import Screen
from autopar.cost.closed import Family
from autopar.cost.forms import Forms
from autopar.cost.hardware import load
from autopar.cost.regime import ours
from autopar.cost.stored import from_data, to_data
from autopar.errors import AutoparError
from autopar.learned import Named
from autopar.presets import configuration
from autopar.ranking import planned, space_of
from autopar.shelf import Known

NAMES = ("hf:llama3-8b-tiny", "hf:mixtral-8x7b-tiny")
ASKED = ["plan", NAMES[0], "h100x8", "--json"]
WITHOUT_TORCH = """
import sys
from autopar.cli.main import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules and "sympy" not in sys.modules
sys.exit(status)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(shelf.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", params=NAMES)
def known(request: pytest.FixtureRequest) -> Known:
    return Named(request.param).learn_on([load("h100x8")])[0]


def ranked(families: tuple[Family, ...]) -> list[tuple[str, float, dict[str, float], dict[str, float]]]:
    machine = load("h100x8")
    found = planned([Forms(f) for f in families], machine, space_of(machine, None, 64), ours(4, "bf16"), 50)
    return [(p.words, p.seconds, p.option.memory, p.option.exposed) for p in found]


def test_families_read_from_text_give_the_same_numbers_to_the_last_bit(known: Known) -> None:
    again = Known.of(known.text())
    assert again.text() == known.text()
    assert len(ranked(known.families)) == 50 and ranked(again.families) == ranked(known.families)
    assert [f.divisors for f in again.families] == [f.divisors for f in known.families]


def test_a_second_answer_is_the_first_and_needs_no_torch(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    first = capfd.readouterr()
    command = [sys.executable, "-c", WITHOUT_TORCH, *ASKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(first.out) and len(json.loads(done.stdout)) == 8
    assert len(list(cache.iterdir())) == 1


def test_a_plan_of_a_name_is_that_of_the_command_and_uses_what_is_kept(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(ASKED) == 0
    said = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(models, "load", None)  # nothing may be loaded again
    plans = autopar.plan(NAMES[0], "h100x8", count=8)
    keys = ("mesh", "strategy", "step_seconds", "peak_bytes", "mfu")
    found = [(p.mesh, p.strategy, p.seconds, p.memory, p.mfu) for p in plans]
    assert found == [tuple(r[k] for k in keys) for r in said] and len(found) == 8
    chosen = autopar.plan(NAMES[0], "h100x8", batch=64, mesh="tp=2", strategy="zero=1")
    assert chosen and all(p.option.sizes["tp"] == 2 and p.option.zero == 1 for p in chosen)
    assert chosen.found.question.space.batch == 64
    with pytest.raises(AutoparError) as error:
        autopar.plan(NAMES[0], "h100x8", kwargs={"input_ids": None})
    assert error.value.slug == "input-structure"


def test_plans_are_copied_and_pickled(cache: Path, tmp_path: Path) -> None:
    """And read by a process that has planned nothing."""
    plans = autopar.plan(NAMES[0], "h100x8", count=2)
    for same in (copy.copy(plans), copy.deepcopy(plans), pickle.loads(pickle.dumps(plans))):
        assert list(same) == list(plans) and same[0].explain() == plans[0].explain()
    (tmp_path / "plans").write_bytes(pickle.dumps((plans, plans[0])))
    read = (
        "import pickle, sys; plans, one = pickle.load(open(sys.argv[1], 'rb')); print(one.explain(), plans[0] == one)"
    )
    done = subprocess.run([sys.executable, "-c", read, str(tmp_path / "plans")], capture_output=True, text=True)
    assert done.stdout == f"{plans[0].explain()} True\n", done.stderr


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b"])
def test_what_came_with_autopar_is_what_a_trace_gives(name: str) -> None:
    """Of the file itself, whatever sources it says that it is of."""
    entry = json.loads((shelf.SHIPPED / f"{shelf.name_of(configuration(name))}.json").read_text())
    at = {m: entry["machines"][shelf.name_of(repr(load(m)))] for m in ("h100", "a100-80g", "b200")}
    machines = [load(m) for m in sorted(at, key=lambda m: (at[m], m))][:: max(1, len(at) - 1)]
    for machine, found in zip(machines, Named(f"hf:{name}").learn_on(machines)):
        kept = Known.of(json.dumps(entry["known"][at[machine.name]]))
        assert kept.text() == found.text(), "run python benchmarks/forms.py"


def test_what_came_with_autopar_is_used_of_the_same_sources_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = configuration("gpt2"), load("h100x8"), "bf16"
    monkeypatch.setattr(shelf, "SHIPPED", tmp_path / "forms")
    shutil.copytree(shelf.ROOT / "presets" / "forms", tmp_path / "forms")
    made = json.loads((tmp_path / "forms" / "made.json").read_text())
    made.update(sources=shelf.sources_of(made["files"]), packages=shelf.packages())
    (tmp_path / "forms" / "made.json").write_text(json.dumps(made))
    found = shelf.shipped(*asked, None)
    assert found is not None and found.title.startswith("GPT2LMHeadModel")
    assert "cost/compute.py" in made["files"] and "trace/export.py" in made["files"]
    others = ((*asked, 64), (*asked[:2], "fp32", None), (asked[0], load("cpux8"), "bf16", None), ({}, *asked[1:], None))
    assert not any(shelf.shipped(*other) for other in others)
    for changed in ({"sources": "0"}, {"packages": {"torch": "2.0"}}, {"files": ["gone.py"]}):
        (tmp_path / "forms" / "made.json").write_text(json.dumps({**made, **changed}))
        assert shelf.shipped(*asked, None) is None


def test_what_a_trace_warned_of_is_said_again(cache: Path, known: Known, capsys: pytest.CaptureFixture[str]) -> None:
    name = shelf.key(configuration("gpt2-tiny"), load("h100x8"), "bf16", None)
    assert shelf.keep(name, replace(known, notes=("a thing was replaced",))) is None
    assert main(["plan", "hf:gpt2-tiny", "h100x8"]) == 0
    assert "warning: a thing was replaced" in capsys.readouterr().err


def damaged(path: Path) -> list[str]:
    text = path.read_text()
    digit = next(i for i in range(len(text) // 2, len(text)) if text[i] in "1234")
    return ["", text[: len(text) // 2], text[:digit] + "9" + text[digit + 1 :], "{}", text.partition("\n")[2]]


def test_what_was_changed_or_cut_short_is_passed_over_and_written_again(cache: Path) -> None:
    machine, screen = load("h100x8"), Screen(quiet=True)
    Named(NAMES[0], say=screen.say).known(machine)
    (path,) = cache.iterdir()
    whole = path.read_text()
    for text in damaged(path):
        path.write_text(text)
        assert shelf.recall(path.stem) is None
    assert (
        Named(NAMES[0], say=screen.say).known(machine).text() == whole.partition("\n")[2] and path.read_text() == whole
    )


def test_another_question_is_another_file() -> None:
    def name(
        configuration: Any = (("a", 1),), machine: str = "h100x8", precision: str = "bf16", length: Any = 64
    ) -> str:
        return shelf.key(dict(configuration), load(machine), precision, length)

    others = [
        name((("a", 2),)),
        name(machine="a100-80gx8"),
        name(precision="fp32"),
        name(length=128),
        name(length=None),
    ]
    assert len({name(), *others}) == 6 and name(machine="h100x1024") == name()


def test_another_source_is_another_file(tmp_path: Path) -> None:
    before = shelf.sources()
    shutil.copytree(Path(shelf.__file__).parent, tmp_path / "autopar", ignore=shutil.ignore_patterns("__pycache__"))
    assert shelf.sources(tmp_path / "autopar") == before
    path = tmp_path / "autopar" / "cost" / "compute.py"
    path.write_text(path.read_text() + "\n")
    shelf.sources.cache_clear()
    assert shelf.sources(tmp_path / "autopar") != before


def test_an_empty_variable_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(shelf.VARIABLE, "")
    assert shelf.folder() is None and main(ASKED) == 0 and not list(tmp_path.iterdir())
    monkeypatch.delenv(shelf.VARIABLE)
    assert shelf.folder() == tmp_path / "autopar"


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(shelf.VARIABLE, str(tmp_path / "file"))
    assert main(ASKED) == 0
    assert "takes as long" in capsys.readouterr().err


def test_the_oldest_go(cache: Path, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "KEPT", 3)
    for name in "abcde":
        assert shelf.keep(name, known) is None
    assert len(list(cache.iterdir())) == 3 and shelf.recall("e") is not None


def test_only_what_was_written_is_read(known: Known) -> None:
    data = to_data(known.families)
    for broken in ({}, {**data, "monomials": []}, {**data, "families": [{}]}, {**data, "families": 1}):
        with pytest.raises(shelf.BROKEN):
            from_data(broken)
