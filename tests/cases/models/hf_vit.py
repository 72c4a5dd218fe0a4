"""ViT: a convolution cuts patches, a class token makes their number odd, and alone is read."""

import torch
import transformers
from torch import Tensor, nn

from tests.cases.hugging_face import Wrap, sharpened


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes)
    return Wrap(sharpened(transformers.ViTForImageClassification(config)), "pixel_values", cache=False).eval()


def make_inputs() -> tuple[Tensor, ...]:
    return (torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)),)
