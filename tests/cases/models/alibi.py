"""ALiBi slopes are a per-head constant: rank r must use slopes of its global heads, not of heads 0..n_local.

Seen in bigscience-workshop/Megatron-DeepSpeed#227; flashinfer-ai/flashinfer#1606.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attn(nn.Module):
    def __init__(self, d=32, nh=4):
        super().__init__()
        self.nh, self.hd = nh, d // nh
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.register_buffer("slopes", torch.tensor([2.0 ** (-8 * (i + 1) / nh) for i in range(nh)]), persistent=False)

    def forward(self, x):
        b, s, _ = x.shape

        def sp(t):
            return t.view(b, s, self.nh, self.hd).transpose(1, 2)

        pos = torch.arange(s)
        bias = self.slopes[:, None, None] * (pos[None, :] - pos[:, None])
        bias = bias.masked_fill(pos[None, :] > pos[:, None], float("-inf"))
        y = F.scaled_dot_product_attention(sp(self.q(x)), sp(self.k(x)), sp(self.v(x)), attn_mask=bias[None])
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


def make_model():
    torch.manual_seed(0)
    return Attn()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 9, 32),)
