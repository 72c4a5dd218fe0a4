"""torch.utils.checkpoint inside forward: values right but the recompute region must survive tracing (else the memory
estimate and peak memory are wrong).

Seen in pytorch/pytorch#179021; pytorch/pytorch#185140; pytorch/pytorch#179043; rachtibat/LRP-eXplains-
Transformers#3.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.ls = nn.ModuleList(nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, d)) for _ in range(3))

    def forward(self, x):
        for l in self.ls:
            x = x + checkpoint(l, x, use_reentrant=False)
        return x


def make_model():
    torch.manual_seed(0)
    return Net().train()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)
