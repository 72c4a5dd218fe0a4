import re
import shlex
from pathlib import Path

import pytest

from autopar.cli.main import build, main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SAMPLES = re.findall(r"^\$ autopar (.*)\n((?:.*\n)*?)```", README, flags=re.M)
COMMANDS = re.findall(r"^(?:\$ )?autopar ([^#\n]*)", README, flags=re.M)


@pytest.mark.parametrize(("command", "shown"), SAMPLES)
def test_sample_output_is_real(capsys, command, shown):
    assert main(shlex.split(command)) == 0
    real = capsys.readouterr().out.splitlines()
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert lines and [line for line in lines if line not in real] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    assert callable(build().parse_args(shlex.split(command)).run)


def test_there_are_samples():
    assert SAMPLES and len(COMMANDS) >= 5
