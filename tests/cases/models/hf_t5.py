"""T5: encoder and decoder, a relative bias computed in the first layer only, an embedding tied four times."""

import torch
import transformers
from torch import Tensor, nn

from tests.cases.hugging_face import Wrap, ids, mask


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=96, decoder_start_token_id=0, **sizes)
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return Wrap(transformers.T5ForConditionalGeneration(config), *names).eval()


def make_inputs() -> tuple[Tensor, ...]:
    return ids(), mask((1, slice(9, None))), ids(10, 2)
