"""The printed file runs by itself and computes the same loss."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from autopar.emit.module import ParallelModule
from autopar.emit.params import Place
from tests.emit.test_module import on_ranks
from tests.emit.tiny import DTYPE, WIDE, batch, mine, tiny

ROOT = pathlib.Path(__file__).parents[2]


def printed(text: str) -> str:
    def body(pm: ParallelModule, place: Place) -> Any:
        pm.train_step(mine(batch(), place))
        return pm.to_python()

    texts = on_ranks(text, body)
    assert len(set(texts)) == 1
    return str(texts[0])


@pytest.mark.parametrize("text", ["tp=1", "dp=2,tp=2"])
def test_the_file_computes_the_loss_of_the_model(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "parallel.py").write_text(printed(text))
    torch.save(tiny().state_dict(), tmp_path / "weights.pt")
    world = 1 if text == "tp=1" else 4
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*command, str(tmp_path / "parallel.py"), str(tmp_path / "weights.pt")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((4, WIDE), generator=generator).to(DTYPE) * 0.02
    want = tiny()(x)["loss"].item() * (1 if text == "tp=1" else 2)  # every data rank makes up the same rows
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert float(line.split()[1]) == pytest.approx(want, rel=1e-12)


def test_it_imports_torch_and_the_runtime_only() -> None:
    lines = [line for line in printed("dp=2,tp=2").splitlines() if line.startswith(("import ", "from "))]
    modules = {line.split()[1] for line in lines}
    assert {m.split(".")[0] for m in modules} == {"sys", "torch", "autopar"}
    assert all(m.startswith("autopar.runtime") for m in modules if m.startswith("autopar"))
