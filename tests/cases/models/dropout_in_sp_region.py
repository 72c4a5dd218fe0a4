"""Dropout in the sequence-sharded region: each tp rank holds different tokens, so masks must differ (the reverse of
plain tp).

Seen in NVIDIA/Megatron-LM#1256; NVIDIA/TransformerEngine#1272.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.n = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 32), nn.Linear(32, d)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.n(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


def make_model():
    torch.manual_seed(0)
    return Net().train()


def make_inputs():
    torch.manual_seed(1)
    x = torch.randn(1, 4, 16)
    return (torch.cat([x, x], 1),)
