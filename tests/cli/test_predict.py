"""Rows of published runs through the command, and architectures from numbers."""

import csv
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.cost.regime import FSDP, MEGATRON, NANOTRON
from autopar.errors import AutoparError
from autopar.predict import machine_of, regime_of
from autopar.presets.numbers import numbers

ROW = {
    "n_layers": "2", "hidden": "128", "ffn_hidden": "256", "heads": "4", "kv_heads": "2", "vocab": "640",
    "arch": "dense-llama", "seq_len": "128", "gpu": "H100-SXM-80GB", "n_gpus": "8", "tp": "2", "sp": "1", "pp": "2",
    "dp": "2", "mbs": "2", "gbs": "16", "recompute": "none", "precision": "bf16", "framework": "Megatron-LM",
}  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_rows_get_predictions_or_a_reason(tmp_path, capsys):
    cases = [
        ROW, {**ROW, "mbs": ""}, {**ROW, "recompute": "full"}, {**ROW, "hidden": ""}, {**ROW, "tp": "4", "pp": "1"},
        {**ROW, "precision": "amp_fp8"}, {**ROW, "gpu": "abacus"}, {**ROW, "gbs": "3"},
    ]  # fmt: skip
    write(tmp_path / "rows.csv", cases)
    assert main(["predict", str(tmp_path / "rows.csv"), "-o", str(tmp_path / "out.csv")]) == 0
    found = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [r["pred_error"].rpartition("[")[2].partition("]")[0] for r in found] == [
        "", "", "", "missing-architecture", "indivisible-dim", "unpriced-precision", "unknown-hardware",
        "indivisible-batch",
    ]  # fmt: skip
    plain, free, again = found[:3]
    assert all(float(plain[c]) > 0 for c in plain if c.startswith("pred_") and c != "pred_error")
    assert float(free["pred_iter_time_s"]) <= float(plain["pred_iter_time_s"])
    assert float(again["pred_iter_time_s"]) > float(plain["pred_iter_time_s"])
    assert float(again["pred_hw_tflops_per_gpu"]) > float(again["pred_model_tflops_per_gpu"])
    assert "3 of 8 rows predicted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("framework", "regime"),
    [("nanotron", NANOTRON), ("Megatron-LM 2022", MEGATRON), ("", MEGATRON), ("torchtitan FSDP2", FSDP)],
)
def test_the_framework_says_how_states_are_held(framework, regime):
    assert regime_of({"framework": framework}) == regime


@pytest.mark.parametrize(
    ("gpu", "name"), [("H100-SXM-80GB (8 per node, EFA)", "h100"), ("a100_40gb", "a100-80g"), ("GB200", "gb200")]
)
def test_the_gpu_names_a_profile(gpu, name):
    assert machine_of({"gpu": gpu}).name == name


def test_numbers_of_a_model_become_a_configuration():
    assert numbers(ROW)["num_key_value_heads"] == 2
    assert numbers({**ROW, "arch": "dense-gpt", "kv_heads": ""})["n_embd"] == 128
    whole = 2 * 128 * (2 * 128 + 128 + 3 * 256)
    one, two = whole + 640 * 128, whole + 2 * 640 * 128
    assert numbers({**ROW, "params_b": str(one / 1e9)})["tie_word_embeddings"]
    assert not numbers({**ROW, "params_b": str(two / 1e9)})["tie_word_embeddings"]
    with pytest.raises(AutoparError) as error:
        numbers({**ROW, "arch": "moe-mla"})
    assert error.value.slug == "unknown-architecture"


def test_a_cost_in_closed_form(capsys):
    assert main(["cost", "hf:llama3-8b-tiny", "--mesh", "dp=2,tp=2", "--symbolic"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*" in out and "b*s" in out and "tp all_reduce, forward" in out


def test_two_dumps_are_compared_line_by_line(tmp_path, capsys):
    for name, text in (("a.txt", "x\ny\n"), ("b.txt", "x\nz\n")):
        (tmp_path / name).write_text(text)
    assert main(["compare", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]) == 0
    assert "-y\n+z\n" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["V100", "H100-PCIe", "h1000", "NVIDIA L4", ""])
def test_a_gpu_without_a_profile_is_refused(gpu):
    with pytest.raises(AutoparError) as error:
        machine_of({"gpu": gpu})
    assert error.value.slug == "unknown-hardware"


@pytest.mark.parametrize(
    ("gpu", "profile"),
    [("A100-SXM-80GB", "a100-80g"), ("H100-SXM-80GB (8 per node, EFA)", "h100"), ("GB200", "gb200"), ("H800", "h800")],
)
def test_a_gpu_is_known_by_its_words(gpu, profile):
    assert machine_of({"gpu": gpu}).name == profile


def test_a_variant_has_the_memory_that_its_name_says():
    assert machine_of({"gpu": "a100_40gb"}).memory_bytes == 40e9
    assert machine_of({"gpu": "a100_80gb"}).memory_bytes == machine_of({"gpu": "A100"}).memory_bytes
