"""Llama as it comes, with its default use_cache=True, whose cache objects cannot be traced."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.cases.hugging_face import SIZES, ids, mask


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES)).eval()


def make_inputs() -> tuple[Tensor, ...]:
    return ()


def make_kwargs() -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": mask()}


def loss(out: Any) -> Tensor:
    return out.logits.pow(2).mean() * 10
