"""Row-parallel bias must be added once, and its gradient must not be divided by tp.

Seen in huggingface/text-generation-inference#1036; awslabs/slapo#10; pytorch/torchtitan#4332;
pytorch/torchtitan#3781.
"""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        nn.init.constant_(self.fc2.bias, 3.0)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def make_model():
    torch.manual_seed(0)
    return MLP()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)
