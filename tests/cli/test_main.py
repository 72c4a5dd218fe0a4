import csv
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from autopar.cli import _lower
from autopar.cli._lower import strategy_of
from autopar.cli.arguments import fields, split_axes
from autopar.cli.main import main
from autopar.cost.price import Price
from autopar.errors import AutoparError
from autopar.ir.printer import print_program
from tests.cli import programs

MODEL = "hf:llama-tiny"


@pytest.fixture
def lowered(monkeypatch):
    """Replaces the compiler; holds what it was asked."""
    asked = {}

    def lower(model, kwargs, mesh, strategy, **options):
        asked.update(options, model=model, kwargs=kwargs, mesh=mesh, strategy=strategy)
        program = programs.model()
        if options.get("on_pass"):
            options["on_pass"]("trace", program)
            options["on_pass"]("reshard", program)
        return program

    monkeypatch.setattr(_lower, "lower", lower)
    return asked


def test_dump_prints_the_program_alone_on_stdout(lowered, capsys):
    options = ["--strategy", "sequence_parallel=true,zero=3", "--after", "reshard", "--seq", "12", "--passes", "a,b"]
    assert main(["dump", MODEL, "--mesh", "dp=2,tp=2", *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == print_program(programs.model())
    assert "llama-tiny" in captured.err
    assert lowered["strategy"] == {"sequence_parallel": True, "zero": 3}
    assert (lowered["after"], lowered["passes"], lowered["mesh"]) == ("reshard", "a,b", "dp=2,tp=2")
    assert lowered["kwargs"]["input_ids"].shape == (2, 12)
    assert lowered["model"].training


def test_dump_after_each(lowered, capsys):
    assert main(["dump", MODEL, "--mesh", "tp=2", "--after-each", "--eval"]) == 0
    text = print_program(programs.model())
    assert capsys.readouterr().out == f"==== after trace\n{text}\n==== after reshard\n{text}"
    assert not lowered["model"].training


@pytest.mark.parametrize("block", ["0", "layers.*"])
def test_dump_one_block_of_one_rank(lowered, capsys, block):
    assert main(["dump", MODEL, "--mesh", "tp=2", "--block", block, "--rank", "1"]) == 0
    assert capsys.readouterr().out == print_program(programs.model(), rank=1, block="layers.*")


def test_dump_json(lowered, capsys):
    assert main(["dump", MODEL, "--mesh", "tp=2", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["form"] == "RESHARDED"


@dataclass
class Outcome:
    ok: bool

    def __str__(self):
        return "a table"


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_verify_status(monkeypatch, capsys, ok, status):
    asked = {}

    def verify(model, kwargs, mesh, strategy, **options):
        asked.update(options, model=model, kwargs=kwargs)
        return Outcome(ok)

    monkeypatch.setattr(_lower, "verify", verify)
    assert main(["verify", MODEL, "--mesh", "dp=3,tp=2", "--batch", "2", "--padding"]) == status
    assert capsys.readouterr().out == "a table\n"
    assert asked["fp64"] and not asked["model"].training
    assert asked["kwargs"]["attention_mask"].shape == (6, 16) and asked["kwargs"]["attention_mask"][-1, -1] == 0


PRICE = Price("a100", "tp=2", 2, 8.0, (2.0, 4.0), (0.5, 1.0), (), {"parameters": 7.0}, 10, 1e12)


def test_compare_gives_each_strategy_its_mesh(monkeypatch, capsys):
    asked, rows = [], []

    def price(model, kwargs, mesh, strategy, hardware):
        asked.append((mesh, strategy, hardware))
        rows.append(len(kwargs["input_ids"]))
        return PRICE

    monkeypatch.setattr(_lower, "price", price)
    arguments = ["compare", MODEL, "dp=4,tp=2", "sequence_parallel", "--mesh", "tp=8"]
    assert main([*arguments, "--format", "csv"]) == 0
    assert asked == [("dp=4,tp=2", {}, "h100"), ("tp=8", {"sequence_parallel": True}, "h100")]
    assert rows == [2, 8]  # the same global batch
    read = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(r["strategy"], float(r["compute_seconds"])) for r in read] == [
        ("dp=4,tp=2", 1.5),
        ("sequence_parallel", 1.5),
    ]
    assert main([*arguments, "--format", "json"]) == 0
    assert [r["strategy"] for r in json.loads(capsys.readouterr().out)] == ["dp=4,tp=2", "sequence_parallel"]
    assert main(arguments) == 0
    assert "sequence_parallel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        (["dump", "hf:nope", "--mesh", "tp=2"], "unknown-preset"),
        (["dump", MODEL, "--mesh", "tp=2", "--block", "9"], "unknown-block"),
        (["dump", MODEL, "--mesh", "tp=2", "--rank", "4"], "unknown-rank"),
        (["dump", MODEL, "--mesh", "tp=2", "--strategy", "a=1,a=2"], "bad-strategy"),
        (["verify", MODEL, "--mesh", "xx=2"], "bad-mesh"),
        (["compare", MODEL, "zero=3"], "bad-mesh"),
        (["compare", MODEL, "tp=4", "--cluster", "h100x8"], "bad-mesh"),
        (["compare", MODEL, "tp=4", "--cluster", "h100"], "bad-cluster"),
        (["compare", MODEL, "tp=4", "--hardware", "abacus"], "unknown-hardware"),
        (["compare", MODEL, "dp=4", "--batch", "6"], "indivisible-batch"),
    ],
)
def test_refusals_exit_1_with_nothing_on_stdout(lowered, capsys, arguments, slug):
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and f"[{slug}]" in captured.err and "fix:" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [[], ["nope"], ["dump"], ["dump", MODEL], ["dump", MODEL, "--mesh", "tp=2", "--batch", "0"],
     ["dump", MODEL, "--mesh", "tp=2", "--after", "x", "--after-each"], ["compare", MODEL]],
)  # fmt: skip
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err


def test_python_m_autopar():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "autopar", "dump", "hf:nope", "--mesh", "tp=2"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout) == (1, "") and "[unknown-preset]" in done.stderr


def test_fields():
    assert fields("a, b=false,c=3,d=none,e=ring:2,f=1.5") == {
        "a": True, "b": False, "c": 3, "d": None, "e": "ring:2", "f": 1.5,
    }  # fmt: skip
    assert strategy_of(fields("recompute=none,offload=none,expert_capacity=1.5"), None).recompute == "none"
    assert fields("") == {} and split_axes("tp=8,zero=1,dp=2") == ("tp=8,dp=2", {"zero": 1})
    for text in ("a=", "1x=2", "a b"):
        with pytest.raises(AutoparError):
            fields(text)


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        (["--after", "nope"], "unknown-pass"),
        (["--rank", "2"], "unknown-rank"),
        (["--strategy", "nope=1"], "bad-strategy"),
        (["--passes", "nope"], "bad-pipeline"),
    ],
)
def test_what_the_compiler_cannot_mean_is_refused_before_it_works(capsys, options, slug):
    assert main(["dump", MODEL, "--mesh", "tp=2", *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and f"[{slug}]" in captured.err


def test_dump_of_a_real_model_names_every_pass(capsys):
    assert main(["dump", "hf:llama-tiny", "--mesh", "dp=2,tp=2", "--after-each", "--rank", "1"]) == 0
    out = capsys.readouterr().out
    named = [line.removeprefix("==== after ") for line in out.splitlines() if line.startswith("====")]
    passes = ["data-parallel", "expert-parallel", "tensor-parallel", "context-parallel", "reshard", "localize"]
    assert named == ["trace", *passes]
    assert "program LOCAL on mesh dp=2,tp=2 (4 ranks) at dp=0, tp=1" in out


def test_compare_of_a_real_model(capsys):
    assert main(["compare", "hf:gpt2-tiny", "dp=2", "tp=2", "--format", "json"]) == 0
    one, other = json.loads(capsys.readouterr().out)
    assert one["dp_gradient_bytes"] > 0 and other["tp_forward_bytes"] > 0
    assert one["forward_flops"] == pytest.approx(other["forward_flops"], rel=0.5)
