"""Traced at (4, 8); later called with (4, 12) and (2, 8) (last batch). Static sizes are baked into views/expands: must
re-trace/stay dynamic or say which dim was specialised.

Seen in pytorch/pytorch#140011; pytorch/pytorch#133653; microsoft/nnscaler#10; pytorch/PiPPy#941.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, d=16, nh=2):
        super().__init__()
        self.nh, self.qkv, self.o = nh, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.nh, d // self.nh).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs(b=4, s=8):
    torch.manual_seed(1)
    return (torch.randn(b, s, 16),)
