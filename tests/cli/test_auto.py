"""``--strategy auto`` of dump and verify: what is planned is what they print and compare."""

import re

import pytest

from autopar.cli.main import main

MODEL = "hf:llama-tiny"


def test_dump_prints_the_program_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--after", "reshard", "--batch", "2"]
    assert main(["dump", MODEL, "--mesh", "4", "--strategy", "auto,zero=3", *common]) == 0
    out, err = capsys.readouterr()
    found = re.search(r"^(\S+=\S+) (\S*zero=3\S*): predicted .* a step of 8 rows", err, re.MULTILINE)
    assert found
    data = 1
    for axis, size in (part.split("=") for part in found[1].split(",")):
        data *= int(size) if axis in ("dp", "ep") else 1
    again = ["dump", MODEL, "--mesh", found[1], "--strategy", found[2], "--after", "reshard", "--batch", str(8 // data)]
    assert main(again) == 0
    program = "\nparameters\n"  # what stands before says why there are so many microbatches
    assert program in out and capsys.readouterr().out.partition(program)[2] == out.partition(program)[2]


def test_verify_runs_the_plan_with_the_axes_that_are_decided(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", MODEL, "--mesh", "tp=2", "--devices", "4", "--strategy", "auto"]) == 0
    out, err = capsys.readouterr()
    assert ": equal" in out
    mesh = re.search(r"mesh (\S+):", out)
    assert mesh and "tp=2" in mesh[1].split(",") and mesh[1] in err


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        (["--mesh", "tp=2", "--devices", "4"], "bad-mesh"),
        (["--mesh", "4"], "bad-mesh"),
        (["--mesh", "4", "--devices", "2", "--strategy", "auto"], "bad-mesh"),
        (["--mesh", "tp=3", "--devices", "4", "--strategy", "auto"], "bad-mesh"),
        (["--mesh", "4", "--strategy", "auto", "--passes", "data-parallel"], "bad-strategy"),
        (["--mesh", "4", "--strategy", "auto,zero=9"], "bad-strategy"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], slug: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dump", MODEL, *options]) == 1
    assert f"[{slug}]" in capsys.readouterr().err
