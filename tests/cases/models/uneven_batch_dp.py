"""Batch 5 on dp=2 (3+2 rows) with a mean loss: gradient average must weight ranks by rows, or refuse naming batch 5
and dp 2.

Seen in pytorch/pytorch#67253; huggingface/transformers#608; pytorch/pytorch#37359.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.a, self.b = nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x):
        return (x + self.b(F.gelu(self.a(x)))).pow(2).mean()


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 12) * torch.tensor([1.0, 1, 1, 4, 4]).unsqueeze(1),)


def loss(out):
    return out * 10
