"""Sequence parallel: norm weights/biases are replicated but each tp rank saw only its sequence slice -> grads must be
SUMMED over tp (final norm included).

Seen in NVIDIA/Megatron-LM#1446; NVIDIA/Megatron-LM#443; NVIDIA/TransformerEngine#435; EleutherAI/gpt-neox#1257;
EleutherAI/gpt-neox#1259.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.n = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.n(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.final = nn.LayerNorm(16)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.final(x)


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 8, 16),)
