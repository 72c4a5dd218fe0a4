"""Folders of safetensors files, laid out as Hugging Face does: writing them, and reading this rank's slices of them."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.checkpoint.folder import put, working, write
from autopar.checkpoint.live import Live
from autopar.checkpoint.load import matched
from autopar.checkpoint.whole import wholes
from autopar.emit.params import Place, held_of, wrap
from autopar.emit.rows import Box, boxes
from autopar.errors import AutoparError
from autopar.ir.program import Param

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def library() -> Any:
    """The safetensors package. Raises AutoparError ``missing-package``."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise AutoparError("missing-package", "safetensors is not installed", "pip install autopar[hf]") from error
    return safetensors


def config_of(model: object) -> dict[str, Any] | None:
    """A model's configuration as JSON data, with the name of its class; None where it has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "to_json_string", None)
    found = json.loads(text()) if callable(text) else config
    return {**found, "architectures": [type(model).__name__]} if isinstance(found, dict) else None


def export(live: Live, folder: str | os.PathLike[str], max_shard_bytes: int, config: Mapping[str, Any] | None) -> None:
    """See ``ParallelModule.export_safetensors``."""
    path, peers = Path(os.path.abspath(folder)), live.peers
    peers.meet(f"export_safetensors {path} max_shard_bytes={max_shard_bytes}")
    token = secrets.token_hex(8)

    def check() -> None:
        library()
        if peers.rank == 0:
            if path.exists() and any(path.iterdir()):
                raise AutoparError("folder-exists", f"{path} is not empty", "export into a new folder")
            working(path, token).mkdir(parents=True)

    peers.agreed("export_safetensors", check)
    writer = _Writer(working(path, token), _files(live.params, max_shard_bytes))
    for param, whole in wholes(live):
        if whole is not None:
            writer.add(param.name, whole)

    def finish() -> None:
        if peers.rank == 0:
            writer.finish(config, live.params)
            put(path, token)

    try:
        peers.agreed("export_safetensors", finish)
    except BaseException:
        shutil.rmtree(working(path, token), ignore_errors=True)
        raise


def _files(params: Mapping[str, Param], most: int) -> dict[str, str]:
    """The file of each tensor, filled in order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, param in params.items():
        if groups[-1] and size + param.spec.bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += param.spec.bytes
    if len(groups) == 1:
        return dict.fromkeys(groups[0], WHOLE)
    return {n: f"model-{i:05}-of-{len(groups):05}.safetensors" for i, g in enumerate(groups, 1) for n in g}


class _Writer:
    """Writes a file once its last tensor has come. A failure is kept until ``finish``: others wait in collectives."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder, self.files = folder, files
        self.pending: dict[str, Tensor] = {}
        self.error: Exception | None = None

    def add(self, name: str, whole: Tensor) -> None:
        """The next tensor, in the order of ``files``."""
        if self.error is not None:
            return
        self.pending[name] = whole.contiguous()
        file = self.files[name]
        if len(self.pending) == list(self.files.values()).count(file):
            try:
                library().torch.save_file(self.pending, self.folder / file, metadata={"format": "pt"})
            except Exception as error:
                self.error = error
            self.pending = {}

    def finish(self, config: Mapping[str, Any] | None, params: Mapping[str, Param]) -> None:
        """Index and configuration."""
        if self.error is not None:
            raise self.error
        if set(self.files.values()) != {WHOLE}:
            total = sum(p.spec.bytes for p in params.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self.files.items()))}
            write(self.folder / INDEX, json.dumps(index, indent=2).encode())
        if config is not None:
            dtype = next((str(p.spec.dtype).removeprefix("torch.") for p in params.values() if p.spec.is_float), None)
            write(self.folder / "config.json", json.dumps({**config, "dtype": dtype}, indent=2).encode())


class Weights:
    """The tensors of a safetensors folder, for ``parallelize(..., weights=)``.

    Args:
        folder: with ``model.safetensors``, or its shards and their index.
        cast: whether tensors may be stored in another dtype than the model's.

    Raises:
        AutoparError: ``no-weights`` where the folder has none.
    """

    def __init__(self, folder: str | os.PathLike[str], cast: bool = False) -> None:
        self.folder, self.cast = Path(folder), cast
        files = sorted(set(self._index().values())) if (self.folder / INDEX).is_file() else [WHOLE]
        absent = [f for f in files if not (self.folder / f).is_file()]
        if absent:
            fix = f"give a folder with {WHOLE}, or with {INDEX} and the files that it names"
            raise AutoparError("no-weights", f"{self.folder}: {absent[0]} is missing", fix)
        opened = [library().safe_open(self.folder / f, framework="pt") for f in files]
        self._files: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def _index(self) -> dict[str, str]:
        return dict(json.loads((self.folder / INDEX).read_bytes())["weight_map"])

    @staticmethod
    def of(weights: "Weights | str | os.PathLike[str]") -> "Weights":
        """Weights from themselves, or from a folder."""
        return weights if isinstance(weights, Weights) else Weights(weights)

    def read(
        self,
        model: nn.Module,
        params: Mapping[str, Param],
        place: Place,
        device: torch.device | None = None,
        mine: Container[str] | None = None,
    ) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers, as ``emit.params.initialise`` gives them.

        ``mine``: names that the rank holds, of those in ``params``; all where None.

        Only the rank's own slices are read; a name that is stored under several tied names is compared.

        Raises:
            AutoparError: ``state-dict-mismatch``.
        """
        kept = {n: p for n, p in params.items() if p.kind == "parameter" or (p.kind == "buffer" and p.persistent)}
        names = {n: (n, *p.tied) for n, p in kept.items()}
        slices = {n: f.get_slice(n) for n, f in self._files.items()}
        saved = {n: (tuple(s.get_shape()), _dtype(n, s.get_dtype())) for n, s in slices.items()}
        wanted = {n: (p.spec.shape, p.spec.dtype) for n, p in kept.items()}
        ignored = {a for n, p in params.items() if n not in kept for a in (n, *p.tied)}
        unread = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        ignored |= {n for n in saved if any(re.search(pattern, n) for pattern in unread)}
        found = matched(names, wanted, saved, ignored, self.cast, str(self.folder))
        out = {}
        for name, param in kept.items():
            if mine is not None and name not in mine:
                continue
            local = self._local(found[name], param, place)
            for other in names[name]:
                if other in saved and other != found[name] and not torch.equal(local, self._local(other, param, place)):
                    why = f"{self.folder}: {other} differs from {found[name]}, to which the model ties it"
                    raise AutoparError("state-dict-mismatch", why, "remove one of them, or untie the model")
            out[name] = wrap(local.to(device or place.device), param, place)
        return out

    def _local(self, name: str, param: Param, place: Place) -> Tensor:
        held = held_of(param, place.mesh)
        local = torch.empty(held.local_shape(place.at), dtype=param.spec.dtype)
        for box in boxes(held, place.at):
            box.of_local(local).copy_(self._slice(name, box))
        return local

    def _slice(self, name: str, box: Box) -> Tensor:
        if not box.sizes:
            return self._files[name].get_tensor(name)
        return self._files[name].get_slice(name)[tuple(slice(a, a + n) for a, n in zip(box.start, box.sizes))]


def _dtype(name: str, code: str) -> torch.dtype:
    if code not in _DTYPES:
        raise AutoparError("no-weights", f"{name}: dtype {code} is not supported", f"known: {', '.join(_DTYPES)}")
    return _DTYPES[code]


def read_or_make(
    weights: Weights,
    model: nn.Module,
    params: Mapping[str, Param],
    place: Place,
    device: torch.device | None,
    make: Callable[[Mapping[str, Param]], dict[str, Tensor]],
    mine: Mapping[str, Param],
) -> dict[str, Tensor]:
    """Every tensor of the emitted module that this rank holds: what the folder must have is read, the rest is made.

    Args:
        params: of all ranks. mine: of this one.
    """
    read = weights.read(model, params, place, device, mine)
    return {**read, **make({n: p for n, p in mine.items() if n not in read})}
