"""Python if on a tensor value.

Seen in pytorch/pytorch#93579; huggingface/transformers#29190; huggingface/transformers#39436.
"""

import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        if x.mean() > 0:
            return self.a(x)
        return self.b(x)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Gate())


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 8),)
