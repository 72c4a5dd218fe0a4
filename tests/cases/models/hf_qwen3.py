"""Qwen3: norms of queries and keys whose weight all heads share, tied embedding."""

import torch
import transformers
from torch import Tensor, nn

from tests.cases.hugging_face import SIZES, Wrap, ids, mask, sharpened


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **SIZES)
    return Wrap(sharpened(transformers.Qwen3ForCausalLM(config)), "input_ids", "attention_mask").eval()


def make_inputs() -> tuple[Tensor, ...]:
    return ids(), mask()
