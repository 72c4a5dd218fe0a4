"""LoRA branches next to sharded Linears: column base -> A replicated, B column; row base -> A row (partial sum), B
replicated. Base weights frozen.

Seen in huggingface/peft#3079; meta-pytorch/opacus#789; saforem2/ezpz#208; InfiniTensor/InfiniTrain#150.
"""

import torch
import torch.nn.functional as F
from torch import nn


class LoRA(nn.Module):
    def __init__(self, i, o, r=4):
        super().__init__()
        self.base = nn.Linear(i, o)
        self.base.requires_grad_(False)
        self.A, self.B = nn.Linear(i, r, bias=False), nn.Linear(r, o, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.B(self.A(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = LoRA(16, 64), LoRA(64, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 5, 16),)
