"""An op without a sharding rule on a sharded value (cumsum over the sharded dim, custom op, FFT): message must give
op, module path, source line and the input layout; or fall back to replicate.

Seen in pytorch/pytorch#164543; pytorch/pytorch#153354; pytorch/torchtitan#875; areal-project/AReaL#423; NVIDIA-
NeMo/RL#1051.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Odd(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.up, self.down = nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x):
        h = self.up(x)
        h = torch.fft.rfft(h, dim=-1).abs()
        h = F.pad(h, (0, 15)).cumsum(-1) / 32
        return self.down(h.sort(-1).values.flip(-1))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Odd())


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)
