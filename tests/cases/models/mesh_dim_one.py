"""A mesh with size-1 axes (tp=1, pp=1) must act as 'axis off', not raise or change numerics.

Seen in pytorch/pytorch#113761; pytorch/pytorch#127213.
"""

import torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)
