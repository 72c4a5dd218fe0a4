"""Rows of published runs through the command, and architectures from numbers."""

import csv
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.cost.regime import FSDP, MEGATRON, NANOTRON
from autopar.errors import AutoparError
from autopar.predict import Predictor, machine_of, regime_of
from autopar.presets.numbers import numbers

ROW = {
    "n_layers": "2", "hidden": "128", "ffn_hidden": "256", "heads": "4", "kv_heads": "2", "vocab": "640",
    "arch": "dense-llama", "seq_len": "128", "gpu": "H100-SXM-80GB", "n_gpus": "8", "tp": "2", "sp": "1", "pp": "2",
    "dp": "2", "mbs": "2", "gbs": "16", "recompute": "none", "precision": "bf16", "framework": "Megatron-LM",
}  # fmt: skip


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor()


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
    ("gpu", "name"), [("H100-SXM-80GB (8 per node, EFA)", "h100-efa"), ("a100_40gb", "a100-80g"), ("GB200", "gb200")]
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
    [
        ("A100-SXM-80GB", "a100-80g"),
        ("H100-SXM-80GB (8 per node, EFA)", "h100-efa"),
        ("GB200", "gb200"),
        ("H800", "h800"),
    ],
)
def test_a_gpu_is_known_by_its_words(gpu, profile):
    assert machine_of({"gpu": gpu}).name == profile


def test_a_variant_has_the_memory_that_its_name_says():
    assert machine_of({"gpu": "a100_40gb"}).memory_bytes == 40e9
    assert machine_of({"gpu": "a100_80gb"}).memory_bytes == machine_of({"gpu": "A100"}).memory_bytes


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("8xH100", "h100"), ("NVIDIA H100 80GB HBM3 (EFA)", "h100-efa"), ("H100SXM5", "h100"), ("B200-SXM-180GB", "b200")],
)
def test_spellings_of_a_gpu(gpu, name):
    assert machine_of({"gpu": gpu}).name == name


def test_variants_of_a_gpu_have_their_own_memory():
    small, large = machine_of({"gpu": "a100_40gb"}), machine_of({"gpu": "a100_80gb"})
    assert (small.memory_bytes, large.memory_bytes) == (40e9, 80e9)
    assert small.memory_bandwidth == 1.555e12 < large.memory_bandwidth


@pytest.mark.parametrize(
    "change",
    [{"mbs": "0"}, {"tp": "-1"}, {"pp": "1.5"}, {"seq_len": "abc"}, {"n_layers": "nan"}, {"gpus_per_node": "0"}],
)
def test_what_is_no_count_is_named(change):
    found = Predictor().predict({**ROW, **change})
    assert "[bad-number]" in found["pred_error"] and next(iter(change)) in found["pred_error"]


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"recompute": "sometimes"}, "unpriced-strategy"),
        ({"zero_stage": "4"}, "unpriced-strategy"),
        ({"n_gpus": "16"}, "world-size"),
        ({"tp": "1", "dp": "4", "ep": "2"}, "no-experts"),
        ({"pp": "4", "dp": "1"}, "too-many-stages"),
        ({"vp": "2"}, "too-many-stages"),
        ({"mbs": "3"}, "indivisible-batch"),
    ],
)
def test_what_no_run_takes_is_refused(predictor, change, slug):
    assert f"[{slug}]" in predictor.predict({**ROW, **change})["pred_error"]


def test_a_fault_of_autopar_names_itself(monkeypatch, predictor):
    def fails(*given):
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("autopar.predict.steps", fails)
    found = predictor.predict(ROW)
    assert "ZeroDivisionError: float division by zero [unpriced-row]" in found["pred_error"]
    assert "report it" in found["pred_error"] and not found["pred_iter_time_s"]


def test_dp_may_be_given_without_the_ranks_of_ep(predictor):
    row = {**ROW, "model": "mixtral-8x7b", "arch": "moe", "n_layers": "2", "tp": "1", "pp": "1", "ep": "4", "mbs": "1"}
    within, apart = (predictor.predict({**row, "dp": dp}) for dp in ("8", "2"))
    assert not within["pred_error"] and within == apart


def test_columns_that_are_missing_or_none_take_defaults():
    short = {k: v for k, v in ROW.items() if k not in ("recompute", "precision", "framework", "sp")}
    found = Predictor().predict({**short, "recompute": None, None: ["more"]})
    assert not found["pred_error"] and found == Predictor().predict({**short, "recompute": "none"})


def test_a_model_that_a_preset_has_needs_no_numbers():
    fields = numbers({"model": "DeepSeek-V3(4 layers, 1 dense)", "arch": "moe-mla", "n_layers": "4"})
    assert (fields["num_hidden_layers"], fields["first_k_dense_replace"]) == (4, 1)
    assert fields["hidden_size"] == 7168 and "architectures" not in fields
    assert numbers({"model": "DeepSeek-V2(4 layers)", "arch": "moe-mla"})["n_routed_experts"] == 160
    assert numbers({"model": "Llama3-8B"})["num_hidden_layers"] == 32
    with pytest.raises(AutoparError) as error:
        numbers({"model": "DeepSeek-V9(4 layers)", "n_layers": "4"})
    assert error.value.slug == "missing-architecture"


def test_megatron_holds_what_its_sources_allocate():
    """Published: 28.29 GiB (SimuMax docs/b200 @4dcaae5, Llama3-70B of 12 layers on tp=8)."""
    row = {
        **ROW, "n_layers": "12", "hidden": "8192", "ffn_hidden": "28672", "heads": "64", "kv_heads": "8",
        "vocab": "128256", "seq_len": "4096", "gpu": "B200-SXM-180GB", "tp": "8", "pp": "1", "dp": "1", "mbs": "1",
        "gbs": "4",
    }  # fmt: skip
    assert float(Predictor().predict(row)["pred_peak_mem_gb"]) == pytest.approx(28.29, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "layout", "memory", "seconds"),
    [
        ("DeepSeek-V2(4 layers)", {"ep": "8", "dp": "8", "pp": "1", "gbs": "32"}, 45.63, 0.3666),
        ("DeepSeek-V2(4 layers)", {"ep": "4", "dp": "4", "pp": "2", "gbs": "16"}, 44.70, 0.2821),
        ("DeepSeek-V3(4 layers, 1 dense)", {"ep": "8", "dp": "8", "pp": "1", "gbs": "32"}, 104.30, 0.6032),
        ("DeepSeek-V3(4 layers, 1 dense)", {"ep": "4", "dp": "4", "pp": "2", "gbs": "16"}, 114.00, 0.4522),
    ],
)
def test_megatron_holds_rows_on_their_way_to_experts(predictor, model, layout, memory, seconds):
    """Published: SimuMax docs/b200 @4dcaae5, GiB. Rows have four names, gradients are kept; sorting takes time."""
    row = {
        "model": model, "arch": "moe-mla", "seq_len": "4096", "gpu": "B200-SXM-180GB", "n_gpus": "8", "tp": "1",
        "mbs": "1", "recompute": "none", "precision": "bf16", "framework": "Megatron-LM", **layout,
    }  # fmt: skip
    found = predictor.predict(row)
    assert float(found["pred_peak_mem_gb"]) == pytest.approx(memory, rel=1e-3)
    assert float(found["pred_iter_time_s"]) == pytest.approx(seconds, rel=0.1)


def test_the_last_stage_keeps_what_it_receives_and_the_gradient_of_its_head(predictor):
    """Published: 87.08 GiB (SimuMax docs/b200 @4dcaae5), with 16 heads of keys (``run_pretrain_llama3.sh``)."""
    row = {
        **ROW, "n_layers": "4", "hidden": "16384", "ffn_hidden": "53248", "heads": "128", "kv_heads": "16",
        "vocab": "128256", "seq_len": "4096", "gpu": "B200-SXM-180GB", "tp": "1", "dp": "4", "mbs": "1", "gbs": "16",
    }  # fmt: skip
    assert float(predictor.predict(row)["pred_peak_mem_gb"]) == pytest.approx(87.08, rel=1e-3)


def test_tensor_collectives_wait_where_stages_lie_on_several_nodes():
    row = {**ROW, "framework": "nanotron", "gpu": "H100 (EFA)", "tp": "2", "pp": "2", "mbs": "1", "gbs": "16"}
    near, far = (
        float(Predictor().predict({**row, "dp": dp, "gbs": gbs, "n_gpus": gpus})["pred_iter_time_s"])
        for dp, gbs, gpus in (("2", "16", "8"), ("4", "32", "16"))
    )
    assert far > 1.5 * near


def test_a_compiled_model_runs_fused_kernels():
    row = {**ROW, "framework": "torchtitan FSDP2", "tp": "1", "pp": "1", "dp": "8", "seq_len": "4096"}
    eager, compiled = (float(Predictor().predict({**row, "compile": c})["pred_iter_time_s"]) for c in ("0", "1"))
    assert compiled < 0.9 * eager
