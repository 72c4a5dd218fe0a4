"""Steps that are run on real processes: their bytes are those predicted, their losses those of the unsharded model."""

import json
from functools import partial

import pytest
import torch

from autopar.cli.arguments import split_axes
from autopar.cli.main import main
from autopar.cli.measured import made
from autopar.errors import AutoparError
from autopar.measure import measure, rows_of
from autopar.planner import compare
from autopar.plans import closer, rehearsed
from autopar.runtime.live import Live

MODEL, ROWS, TOKENS = "hf:llama3-8b-tiny", 16, 128
STRATEGIES = ("dp=2", "tp=2", "dp=2,zero=3", "pp=2,microbatches=4,schedule=gpipe", "dp=2,recompute=full")


@pytest.fixture(scope="module")
def plans():
    model = made(MODEL, ROWS, TOKENS, False)[0].to("meta")
    ids = torch.zeros(2, TOKENS, dtype=torch.int64, device="meta")
    asked = [(s, *split_axes(s)) for s in STRATEGIES]
    rows = compare(
        model, "cpux2", (), {"input_ids": ids, "labels": ids.clone()}, asked, batch=ROWS, sequence=TOKENS,
        precision="fp32",
    )  # fmt: skip
    return {n: closer(p, rehearsed(p)) for n, p in rows}


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_are_as_predicted_and_losses_as_unsharded(plans, name):
    plan = plans[name]
    job = partial(made, MODEL, ROWS, TOKENS, False)
    found = measure(job, plan.mesh, f"{plan.strategy},hardware=cpu".strip(","), steps=1)
    assert plan.memory == pytest.approx(found.peak, rel=0.1)
    assert len(found.peaks) == 2 and len(found.seconds) == 1
    model, batch = job()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i, loss in enumerate(found.losses):
        expected = model(**batch(i)).loss
        assert loss == pytest.approx(expected.item(), abs=1e-4)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_refusal_of_the_ranks_is_raised_here():
    with pytest.raises(AutoparError) as error:
        measure(partial(made, MODEL, ROWS, TOKENS, False), "tp=2", "stages=nowhere")
    assert error.value.slug


def test_rows_are_counted_over_the_data_axes_in_mesh_order():
    from autopar.ir.mesh import Mesh

    batch = {"x": torch.arange(8), "scale": 3}
    mesh = Mesh.parse("dp=2,tp=2,ep=2")
    assert [rows_of(batch, mesh, r)["x"].tolist()[0] for r in range(8)] == [0, 2, 0, 2, 4, 6, 4, 6]
    assert [mesh.data_rank(at) for at in mesh] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert rows_of(batch, mesh, 0)["scale"] == 3


def test_bytes_alive_are_counted_through_views_and_resizing():
    x = torch.zeros(256)
    with Live([x]) as live:
        y = x + 1
        z = y.view(16, 16)
        assert live.total() == 2048
        y.untyped_storage().resize_(0)
        assert live.total() == 1024
        y.untyped_storage().resize_(1024)
        del y, z
    assert live.total() == 1024 and live.peak == 2048


def test_compare_puts_measured_beside_predicted(capsys):
    arguments = ["compare", MODEL, "--cluster", "cpux2", "dp=2", "--measure", "--steps", "1", "--batch", "8"]
    assert main([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["measured_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.15)
    assert row["step_error"] == pytest.approx(row["step_seconds"] / row["measured_step_seconds"] - 1)


def test_what_needs_more_processes_is_not_run_and_said(capsys):
    arguments = ["compare", MODEL, "--cluster", "cpux64", "dp=64", "--measure", "--processes", "2", "--batch", "64"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "not run" in captured.out and "64 ranks, 2 processes here" in captured.err


def test_measuring_needs_a_cluster(capsys):
    assert main(["compare", MODEL, "dp=2", "--measure"]) == 1
    assert "[bad-cluster]" in capsys.readouterr().err


def test_the_difference_of_two_dumps(tmp_path, capsys):
    one, other = tmp_path / "a.txt", tmp_path / "b.txt"
    for path, mesh in ((one, "tp=2"), (other, "dp=2")):
        assert main(["dump", "hf:llama-tiny", "--mesh", mesh, "--after", "reshard", "--block", "0"]) == 0
        path.write_text(capsys.readouterr().out)
    assert main(["compare", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"--- {one}\n+++ {other}\n") and "-" in text and "@dp" in text
    assert main(["compare", str(one), str(one)]) == 0 and capsys.readouterr().out == "equal\n"
    assert main(["compare", str(one), str(one), str(other)]) == 1
