"""Sequence length 7 on tp=2 with sequence parallel: pad and strip, or say seq=7, tp=2. Peers mis-size activations or
hang.

Seen in pytorch/torchtitan#1306; pytorch/torchtitan#686; NVIDIA-NeMo/RL#2110; hpcaitech/ColossalAI#6381.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x):
        return self.n2(x + self.fc2(F.gelu(self.fc1(self.n1(x)))))


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 7, 16),)
