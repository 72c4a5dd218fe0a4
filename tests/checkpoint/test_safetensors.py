"""Hugging Face folders: written from any mesh, read by transformers; and read slice by slice."""

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import autopar
from autopar.checkpoint import safetensors
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from tests.checkpoint.models import adamw, agree, batch, llama, mine, parallel, train
from tests.ranks import Ranks


def export(mesh: str, folder: pathlib.Path) -> Any:
    pm = parallel("llama", mesh)
    train(pm, adamw(pm), "llama", mesh, range(2))
    pm.export_safetensors(folder / "one")
    pm.export_safetensors(folder / "shards", max_shard_bytes=4000)
    with pytest.raises(AutoparError, match="folder-exists"):
        pm.export_safetensors(folder / "one")
    full = pm.full_state_dict()
    return full, pm.full_parameters(), pm.eval()(**mine(batch("llama", 3), mesh)).logits.detach()


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_transformers_reads_what_was_exported(ranks: Ranks, mesh: str, tmp_path: pathlib.Path) -> None:
    (full, params, _), *others = found = ranks.run(Mesh.parse(mesh).world, export, mesh, tmp_path, timeout=120.0)
    tp = Mesh.parse(mesh).size("tp")
    logits = torch.cat([f[2] for f in found[::tp]])
    assert all(other[0] == {} for other in others)
    fresh = llama(seed=9)
    fresh.load_state_dict(full)
    agree(dict(fresh.named_parameters()), params)
    assert set(load_file(tmp_path / "one" / "model.safetensors")) == set(params)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(params)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in params.values())
    files = list((tmp_path / "shards").glob("model-*-of-*.safetensors"))
    assert len(files) == len(set(index["weight_map"].values())) > 2
    assert all(sum(t.nbytes for t in load_file(f).values()) <= 4000 for f in files)
    for name in ("one", "shards"):
        model, told = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
        with torch.no_grad():
            torch.testing.assert_close(model(**batch("llama", 3)).logits, logits, rtol=1e-5, atol=1e-5)
        agree(dict(model.named_parameters()), params)


class Counted:
    """A file that counts the bytes that are read of it."""

    def __init__(self, file: Any, read: list[int]) -> None:
        self.file, self.read = file, read

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._told(self.file.get_tensor(name))

    def _told(self, x: Tensor) -> Tensor:
        self.read.append(x.nbytes)
        return x

    def get_slice(self, name: str) -> Any:
        outer, part = self, self.file.get_slice(name)

        class Slice:
            get_shape, get_dtype = part.get_shape, part.get_dtype

            def __getitem__(self, index: Any) -> Tensor:
                return outer._told(part[index])

        return Slice()


def take(mesh: str, folder: pathlib.Path, strategy: str) -> Any:
    read: list[int] = []
    library = safetensors.library

    class Library:
        @staticmethod
        def safe_open(*args: Any, **kwargs: Any) -> Counted:
            return Counted(library().safe_open(*args, **kwargs), read)

    safetensors.library = lambda: Library
    try:
        with torch.device("meta"):
            model = llama(seed=9)
        pm = autopar.parallelize(model, mesh, kwargs=mine(batch("llama", 0), mesh), weights=folder, strategy=strategy)
    finally:
        safetensors.library = library
    held = sum(p._local_tensor.nbytes if hasattr(p, "_local_tensor") else p.nbytes for p in pm.parameters())
    return pm.full_parameters(), sum(read), max(read), held, float(pm.train_step(**mine(batch("llama", 3), mesh)))


@pytest.mark.parametrize(
    ("mesh", "strategy", "shards"), [("tp=2", "", False), ("dp=2,tp=2", "", True), ("dp=2,tp=2", "zero=3", True)]
)
def test_a_meta_model_reads_only_its_slices(
    ranks: Ranks, mesh: str, strategy: str, shards: bool, tmp_path: pathlib.Path
) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="4KB" if shards else "1GB")
    want = {n: p.detach() for n, p in model.named_parameters()}
    loss = float(model(**batch("llama", 3)).loss.detach())
    whole = sum(p.nbytes for p in want.values())
    for params, read, most, held, got in ranks.run(
        Mesh.parse(mesh).world, take, mesh, tmp_path, strategy, timeout=120.0
    ):
        agree(params, want)
        assert read == held < 0.6 * whole
        assert most <= max(p.nbytes for p in want.values()) / 2
        assert got == pytest.approx(loss, rel=1e-5)


def wrong(mesh: str, folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    out = {}
    weights = autopar.Weights(folder / "dtype", cast=True)
    pm = autopar.parallelize(llama(seed=9), mesh, kwargs=mine(batch("llama", 0), mesh), weights=weights)
    for case in sorted(p.name for p in folder.iterdir()):
        with pytest.raises(AutoparError) as error:
            if case == "absent":
                autopar.parallelize(llama(seed=9), mesh, kwargs=mine(batch("llama", 0), mesh), weights=folder / case)
            autopar.Weights(folder / case).read(llama(), pm._params, pm._place)
        out[case] = (error.value.slug, error.value.message)
    assert all(p.dtype == torch.float32 for p in pm.parameters())
    torch.testing.assert_close(pm.full_parameters()["model.norm.weight"], torch.ones(16))
    return out


def test_what_does_not_fit_is_listed(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    state = {n: p.detach().clone() for n, p in llama().named_parameters()}
    first = "model.embed_tokens.weight"
    name = "model.layers.0.mlp.up_proj.weight"
    cases: dict[str, dict[str, Tensor]] = {
        "names": {n.replace("layers.1.mlp.up", "layers.1.mlp.over"): t for n, t in state.items()},
        "shape": {**state, name: torch.zeros(3, 16)},
        "tied": {**state, "lm_head.weight": state[first] + 1},
        "dtype": {n: t.bfloat16() for n, t in state.items()},
        "absent": {},
    }
    for case, tensors in cases.items():
        (tmp_path / case).mkdir()
        if tensors:
            save_file(tensors, tmp_path / case / "model.safetensors")
    for told in ranks.run(2, wrong, "tp=2", tmp_path, timeout=120.0):
        assert {c: slug for c, (slug, _) in told.items()} == {
            c: "no-weights" if c == "absent" else "state-dict-mismatch" for c in cases
        }
        assert "missing: model.layers.1.mlp.up_proj.weight [20, 16]" in told["names"][1]
        assert "unexpected: model.layers.1.mlp.over_proj.weight [20, 16]" in told["names"][1]
        assert f"{name}: shape [3, 16] saved, [20, 16] in the model" in told["shape"][1]
        assert f"lm_head.weight differs from {first}" in told["tied"][1]
        assert "torch.bfloat16 saved, torch.float32 in the model (cast=True allows it)" in told["dtype"][1]
