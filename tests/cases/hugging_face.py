"""Tiny Hugging Face models called with positional tensors."""

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, ROWS = 96, 16, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


class Wrap(nn.Module):
    """Positional tensors in, one field of the output out."""

    def __init__(self, model: nn.Module, *names: str, out: str = "logits", cache: bool = True) -> None:
        super().__init__()
        self.m, self.names, self.out, self.cache = model, names, out, cache

    def forward(self, *args: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(self.names, args))
        if self.cache:
            given["use_cache"] = False
        return getattr(self.m(**given), self.out)


def sharpened(model: nn.Module) -> nn.Module:
    """With larger weights: as drawn, attention is almost uniform, which hides faults of masks and positions."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(6.0)
    return model


def ids(length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(seed))


def mask(*ends: tuple[int, slice]) -> Tensor:
    """Ones but for the given places of rows."""
    out = torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row, where in ends:
        out[row, where] = 0
    return out
