"""Strided, padded conv stem + grouped conv before Linear blocks: batch sharding is fine, spatial sharding is not; must
not raise 'Stride must be 1 when there is padding'.

Seen in pytorch/pytorch#176446.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3)
        self.dw = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = F.gelu(self.dw(self.stem(x))).flatten(2).transpose(1, 2)
        return (x + self.fc2(F.gelu(self.fc1(x)))).mean(1)


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 3, 16, 16),)
