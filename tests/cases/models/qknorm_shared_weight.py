"""Qwen3-style q_norm/k_norm: one head_dim weight used by every head. Under tp each rank only has the gradient of its
heads -> needs an all-reduce.

Seen in NVIDIA-NeMo/RL#3716; NVIDIA/Megatron-LM#816.
"""

import torch
import torch.nn.functional as F
from torch import nn


class RMS(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(d))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attn(nn.Module):
    def __init__(self, d=32, nh=4, nkv=2):
        super().__init__()
        self.nh, self.nkv, self.hd = nh, nkv, d // nh
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj, self.v_proj = nn.Linear(d, nkv * self.hd, bias=False), nn.Linear(d, nkv * self.hd, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.q_norm, self.k_norm = RMS(self.hd), RMS(self.hd)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, s, -1, self.hd)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, s, -1, self.hd)).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.hd).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, s, -1))


def make_model():
    torch.manual_seed(0)
    return Attn()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 6, 32),)
