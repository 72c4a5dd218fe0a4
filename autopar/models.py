"""Models by name, with example inputs for any batch and sequence."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.configurations import configured
from autopar.errors import AutoparError
from autopar.runtime.garbage import uncollected

Kwargs = dict[str, Any]
SHARPEN = 6.0
FLAT = 0.05


@dataclass(frozen=True)
class LoadedModel:
    """A model and how to call it.

    Args:
        model: the module, on the meta device or with real weights.
        kwargs: (batch, sequence) to keyword arguments with a loss in reach, on the model's device.
        description: one line for people.
        sequence: a sequence length that suits the model.
        padding: the same as ``kwargs``, but the last row ends in padding where the model has a mask.
    """

    model: nn.Module
    kwargs: Callable[[int, int], Kwargs]
    description: str
    sequence: int = 16
    padding: Callable[[int, int], Kwargs] | None = None


def sharpen(model: nn.Module) -> nn.Module:
    """Multiply, in place, the matrices that were drawn with a deviation under 0.05 by 6, and return the model.

    The usual deviation of 0.02 makes attention almost uniform, which hides faults of masks and positions.
    """
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2 and not p.is_meta and p.is_floating_point() and float(p.float().std()) < FLAT:
                p.mul_(SHARPEN)
    return model


def load(text: str, *, meta: bool = True, seed: int = 0, words: int = 0) -> LoadedModel:
    """``hf:NAME``, ``hf:path/config.json``, ``hf:folder`` or ``module:callable`` to a model.

    With ``meta`` a Hugging Face model is made on the meta device, without weights; otherwise it is drawn from ``seed``
    and sharpened. Its vocabulary, where it has one, is widened to ``words``. Raises AutoparError ``unknown-model``,
    ``unknown-preset``, ``missing-package``.
    """
    kind, _, name = text.partition(":")
    if not name:
        raise AutoparError("unknown-model", f"{text!r} names no model", "write hf:NAME, hf:FOLDER or module:callable")
    if kind == "hf":
        with uncollected():
            return _from_config(_widened(configured(name), words), text, meta, seed)
    return _from_callable(kind, name, meta, seed)


def _widened(values: Mapping[str, Any], words: int) -> Mapping[str, Any]:
    return {**values, "vocab_size": max(values["vocab_size"], words)} if "vocab_size" in values else values


def _device(meta: bool) -> AbstractContextManager[Any]:
    return torch.device("meta") if meta else nullcontext()


def _from_config(values: Mapping[str, Any], text: str, meta: bool, seed: int) -> LoadedModel:
    try:
        import transformers
    except ImportError as error:
        raise AutoparError("missing-package", f"{text} needs transformers", "pip install 'autopar[hf]'") from error
    fields = dict(values)
    kind = fields.pop("model_type", None)
    if kind is None:
        raise AutoparError("unknown-model", f"{text}: the configuration has no model_type", "add its model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.random.fork_rng(devices=[]), _device(meta):
        torch.manual_seed(seed)
        model = _head(transformers, config, text)(config)
    if not meta:
        sharpen(model)
    decoders = transformers.AutoModelForCausalLM._model_mapping
    decoder = type(config) in decoders and isinstance(model, decoders[type(config)])
    inputs = _Inputs(config, model, decoder, seed)
    size = sum(p.numel() for p in model.parameters())
    where = "on the meta device" if meta else f"drawn from seed {seed}"
    return LoadedModel(
        model,
        inputs,
        f"{text}: {type(model).__name__}, {_count(size)} parameters, {where}",
        min(2048, getattr(config, "max_position_embeddings", 2048)) if size > 1e7 else 16,
        inputs.padded,
    )


def _count(size: int) -> str:
    for scale, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if size >= scale:
            return f"{size / scale:.3g}{unit}"
    return str(size)


def _head(transformers: Any, config: Any, text: str) -> Any:
    """The class of the model: the configuration's own, else the first automatic class that knows its type."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification"):
        known = getattr(transformers, f"AutoModelFor{auto}")._model_mapping
        if type(config) in known:
            return known[type(config)]
    raise AutoparError("unknown-model", f"{text}: no class for {type(config).__name__}", "name it in architectures")


@dataclass(frozen=True)
class _Inputs:
    """Example inputs of a Hugging Face model: ids [B, S] or pictures [B, C, H, W], and labels."""

    config: Any
    model: nn.Module
    decoder: bool
    seed: int

    def __call__(self, batch: int, sequence: int) -> Kwargs:
        """Without padding; encoders get a mask of ones, decoders none."""
        return self._make(batch, sequence, padded=False)

    def padded(self, batch: int, sequence: int) -> Kwargs:
        """With a mask whose last row ends in padding, and no labels there."""
        return self._make(batch, sequence, padded=True)

    def _make(self, batch: int, sequence: int, padded: bool) -> Kwargs:
        generator = torch.Generator().manual_seed(self.seed + 1)
        if self.model.main_input_name == "pixel_values":
            out = self._pictures(batch, generator)
        else:
            out = self._tokens(batch, sequence, padded, generator)
        device = next(self.model.parameters()).device
        return {k: v.to(device) for k, v in out.items()}

    def _pictures(self, batch: int, generator: torch.Generator) -> Kwargs:
        size = self.config.image_size
        shape = (batch, self.config.num_channels, *(size if isinstance(size, (list, tuple)) else (size, size)))
        labels = torch.randint(0, self.config.num_labels, (batch,), generator=generator)
        return {"pixel_values": torch.randn(shape, generator=generator), "labels": labels}

    def _tokens(self, batch: int, sequence: int, padded: bool, generator: torch.Generator) -> Kwargs:
        def draw() -> torch.Tensor:
            return torch.randint(3, self.config.vocab_size, (batch, sequence), generator=generator)

        ids, labels = draw(), draw()
        mask = torch.ones_like(ids)
        if padded:
            mask[-1, sequence - sequence // 3 :] = 0
            labels[-1, sequence - sequence // 3 :] = -100
        if self.decoder and not padded:
            return {"input_ids": ids, "labels": labels}
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _from_callable(module: str, name: str, meta: bool, seed: int) -> LoadedModel:
    """A callable that returns the model, or (model, kwargs) or (model, function of batch and sequence)."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise AutoparError("unknown-model", f"{module}:{name}: {error}", "name an importable callable") from error
    with torch.random.fork_rng(devices=[]), _device(meta):
        torch.manual_seed(seed)
        made = make()
    model, inputs = made if isinstance(made, tuple) else (made, getattr(made, "dummy_inputs", None))
    if not isinstance(model, nn.Module) or inputs is None:
        raise AutoparError(
            "unknown-model", f"{module}:{name} gave no model with inputs", "return (model, kwargs) or (model, function)"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def kwargs(batch: int, sequence: int) -> Kwargs:
        found = inputs(batch, sequence) if callable(inputs) else inputs
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in found.items()}

    return LoadedModel(model, kwargs, f"{module}:{name}: {type(model).__name__}")
