"""Training-mode dropout under tp: replicated activations need the same mask on all ranks, head/feature-sharded
activations need different masks.

Seen in awslabs/slapo#21; tenstorrent/tt-metal#55947; pytorch/pytorch#103910; pytorch/torchtitan#689.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, p=0.5):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.inner, self.outer = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x):
        return self.outer(self.fc2(self.inner(F.relu(self.fc1(x)))))


def make_model():
    torch.manual_seed(0)
    return Net().train()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 8, 16),)
