"""Dropout and BatchNorm mode are baked into the exported graph; m.train()/m.eval() on the parallel module must switch,
or raise - never silently keep dropout on in eval.

Seen in pytorch/pytorch#151726; pytorch/pytorch#103681.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(d, 32), nn.Dropout(0.5), nn.Linear(32, d)

    def forward(self, x):
        return self.b(self.drop(F.relu(self.a(x))))


def make_model():
    torch.manual_seed(0)
    return Net().eval()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)
