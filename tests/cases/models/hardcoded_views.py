"""Every size is a Python constant: view(b,s,H,D), reshape(b,s,H*D), expand and split sizes. After head sharding the
constants in the graph must be rewritten.

Seen in pytorch/pytorch#143372; pytorch/pytorch#161950; pytorch/pytorch#179632; huggingface/transformers#48307;
microsoft/nnscaler#10.
"""

import math

import torch
from torch import nn

B, S, H, KV, D = 2, 6, 4, 2, 8


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(H * D, (H + 2 * KV) * D)
        self.out = nn.Linear(H * D, H * D)

    def forward(self, x):
        q, k, v = torch.split(self.qkv(x), [H * D, KV * D, KV * D], dim=-1)
        q = q.view(B, S, H, D).permute(0, 2, 1, 3)
        k = k.view(B, S, KV, D).permute(0, 2, 1, 3)
        v = v.view(B, S, KV, D).permute(0, 2, 1, 3)
        k = k[:, :, None].expand(B, KV, H // KV, S, D).reshape(B, H, S, D)
        v = v[:, :, None].expand(B, KV, H // KV, S, D).reshape(B, H, S, D)
        w = torch.einsum("bhqd,bhkd->bhqk", q, k).reshape(B * H, S, S) / math.sqrt(D)
        w = w.softmax(-1).reshape(B, H, S, S)
        o = torch.einsum("bhqk,bhkd->bqhd", w, v).reshape(B, S, H * D)
        return self.out(o)


def make_model():
    torch.manual_seed(0)
    return Attn()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(B, S, H * D),)
