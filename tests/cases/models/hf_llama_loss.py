"""Llama with labels: the model shifts them and takes a mean over tokens that differ in number between rows."""

import torch
import transformers
from torch import Tensor, nn

from tests.cases.hugging_face import SIZES, Wrap, ids, mask, sharpened


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES))
    return Wrap(sharpened(model), "input_ids", "attention_mask", "labels", out="loss").train()


def make_inputs() -> tuple[Tensor, ...]:
    labels = ids()
    labels[0, :9] = labels[1, :2] = labels[3, 5:] = -100
    return ids(), mask(), labels
