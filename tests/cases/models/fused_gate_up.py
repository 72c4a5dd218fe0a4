"""SwiGLU with one fused gate_up Linear then chunk(2): contiguous column shard pairs gate with gate.

Seen in sgl-project/sglang-jax#1096; tenstorrent/tt-metal#52818.
"""

import torch
import torch.nn.functional as F
from torch import nn


class GLU(nn.Module):
    def __init__(self, d=16, f=24):
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x):
        g, u = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(g) * u)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(GLU(), GLU())


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 5, 16),)
