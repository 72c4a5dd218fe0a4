"""Llama with fewer key heads than ranks, and padding on the left."""

import torch
import transformers
from torch import Tensor, nn

from tests.cases.hugging_face import SIZES, Wrap, ids, mask, sharpened


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES))
    return Wrap(sharpened(model), "input_ids", "attention_mask").eval()


def make_inputs() -> tuple[Tensor, ...]:
    return ids(), mask((0, slice(0, 5)), (2, slice(0, 2)))
