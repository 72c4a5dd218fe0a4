"""Mixed frozen and trainable parameters in one layer, and one layer that is frozen whole.

Seen in pytorch/pytorch#104690; pytorch/pytorch#91167; deepspeedai/DeepSpeed#2653; deepspeedai/DeepSpeed#4055.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.a.requires_grad_(False)
        self.b.weight.requires_grad_(False)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 12),)
