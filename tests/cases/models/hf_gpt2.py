"""GPT-2: transposed weights, fused and interleaved projections, tied head, learned positions."""

import torch
import transformers
from torch import Tensor, nn

from tests.cases.hugging_face import Wrap, ids, mask, sharpened


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return Wrap(sharpened(transformers.GPT2LMHeadModel(config)), "input_ids", "attention_mask").eval()


def make_inputs() -> tuple[Tensor, ...]:
    return ids(), mask()
