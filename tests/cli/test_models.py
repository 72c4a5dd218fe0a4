import json

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.models import load, sharpen
from autopar.presets import configuration, names, tiny
from autopar.presets.table import aliases

# Billions of parameters, as published with each model.
PUBLISHED = {
    "bert-base": 0.110, "bloom-7b1": 7.07, "deepseek-v2": 235.7, "deepseek-v3": 671, "falcon-7b": 6.92,
    "gemma2-9b": 9.24, "gpt2": 0.124, "llama3-405b": 405.9, "llama3-70b": 70.6, "llama3-8b": 8.03, "mixtral-8x7b": 46.7,
    "neox-20b": 20.6, "olmo2-7b": 7.30, "opt-6.7b": 6.66, "phi3-mini": 3.82, "qwen3-8b": 8.19, "t5-base": 0.223,
    "vit-base": 0.0866,
}  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_presets_have_the_published_size(name):
    loaded = load(f"hf:{name}")
    assert all(p.is_meta for p in loaded.model.parameters())
    size = sum(p.numel() for p in loaded.model.parameters()) / 1e9
    assert size == pytest.approx(PUBLISHED[name], rel=0.005)
    assert all(v.is_meta and v.shape[0] == 2 for v in loaded.kwargs(2, 16).values())


@pytest.mark.parametrize("name", names())
def test_tiny_models_run_with_a_loss(name):
    loaded = load(f"hf:{name}-tiny", meta=False)
    model = loaded.model.eval()
    assert sum(p.numel() for p in model.parameters()) < 300_000
    for make in (loaded.kwargs, loaded.padding):
        loss = model(**make(2, 16)).loss
        assert loss.ndim == 0 and loss.isfinite()


@pytest.mark.parametrize("name", names())
def test_tiny_keeps_architecture_and_head_ratio(name):
    full, small = configuration(name), configuration(f"{name}-tiny")
    assert full.keys() <= small.keys() and full["architectures"] == small["architectures"]
    if "num_key_value_heads" in full:
        assert (
            full["num_attention_heads"] * small["num_key_value_heads"]
            == small["num_attention_heads"] * full["num_key_value_heads"]
        )


def test_tiny_truncates_layer_types_and_keeps_small_tokens():
    config = {"hidden_size": 64, "num_attention_heads": 8, "layer_types": ["a", "b", "a"], "pad_token_id": 1}
    small = tiny(config)
    assert small["layer_types"] == ["a", "b"] and small["pad_token_id"] == 1 and config["hidden_size"] == 64


def test_aliases_name_presets():
    assert set(aliases().values()) <= set(names()) and not set(aliases()) & set(names())
    assert configuration("llama-tiny") == configuration("llama3-8b-tiny")


def test_same_seed_same_model_and_the_caller_s_random_state_stays():
    state = torch.get_rng_state()
    a, b, c = (load("hf:gpt2-tiny", meta=False, seed=s).model.state_dict() for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[n], b[n]) for n in a) and any(not torch.equal(a[n], c[n]) for n in a)


def test_padding_ends_the_last_row():
    made = load("hf:llama-tiny", meta=False).padding(2, 9)
    assert made["attention_mask"].tolist() == [[1] * 9, [1] * 6 + [0] * 3]
    assert made["labels"][1].eq(-100).tolist() == [False] * 6 + [True] * 3


def test_sharpen_scales_flat_matrices_only():
    model = nn.ModuleDict({"flat": nn.Linear(64, 64), "wide": nn.Linear(64, 64)})
    nn.init.normal_(model["flat"].weight, std=0.02)
    nn.init.normal_(model["wide"].weight, std=0.2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sharpen(model)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] * 6 if name == "flat.weight" else before[name])


def test_config_file_and_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(configuration("qwen3-tiny")))
    sizes = [sum(p.numel() for p in load(f"hf:{p}").model.parameters()) for p in (path, tmp_path)]
    assert sizes == [sum(p.numel() for p in load("hf:qwen3-tiny").model.parameters())] * 2


def make_pair():
    return nn.Linear(4, 2), {"input": torch.ones(3, 4)}


def make_sized():
    return nn.Linear(4, 2), lambda batch, seq: {"input": torch.ones(batch, seq, 4)}


def make_bare():
    return nn.Linear(4, 2)


def test_callables():
    assert load("tests.cli.test_models:make_pair").kwargs(9, 9)["input"].shape == (3, 4)
    loaded = load("tests.cli.test_models:make_sized")
    assert loaded.kwargs(2, 5)["input"].shape == (2, 5, 4) and loaded.kwargs(2, 5)["input"].is_meta
    assert not load("tests.cli.test_models:make_sized", meta=False).model.weight.is_meta


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("llama", "unknown-model"),
        ("hf:nope", "unknown-preset"),
        ("hf:nope-tiny", "unknown-preset"),
        ("hf:/nope/config.json", "unknown-model"),
        ("tests.cli.test_models:nope", "unknown-model"),
        ("no.such.module:f", "unknown-model"),
        ("tests.cli.test_models:make_bare", "unknown-model"),
    ],
)
def test_refusals(text, slug):
    with pytest.raises(AutoparError) as caught:
        load(text)
    assert caught.value.slug == slug and caught.value.fix
