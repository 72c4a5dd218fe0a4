"""BERT with a masked language model's head: decoder weight and bias tied, padding on the right."""

import torch
import transformers
from torch import Tensor, nn

from tests.cases.hugging_face import SIZES, Wrap, ids, mask, sharpened


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return Wrap(sharpened(model), "input_ids", "attention_mask", cache=False).eval()


def make_inputs() -> tuple[Tensor, ...]:
    return ids(), mask((0, slice(10, None)), (2, slice(13, None)))
