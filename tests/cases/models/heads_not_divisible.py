"""6 heads on tp=4. Users get a reshape error deep in forward; must either fall back (replicate / uneven heads) or say
heads=6, tp=4 and list valid tp sizes.

Seen in vllm-project/vllm#2652; vllm-project/vllm#52535; deepspeedai/DeepSpeed#3634; vipshop/cache-dit#581.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attn(nn.Module):
    def __init__(self, d=32, nh=4, nkv=4, bias=False):
        super().__init__()
        self.nh, self.nkv, self.hd = nh, nkv, d // nh
        self.wq = nn.Linear(d, nh * self.hd, bias=bias)
        self.wk = nn.Linear(d, nkv * self.hd, bias=bias)
        self.wv = nn.Linear(d, nkv * self.hd, bias=bias)
        self.wo = nn.Linear(nh * self.hd, d, bias=bias)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, -1, self.hd).transpose(1, 2)
        k = self.wk(x).view(b, s, -1, self.hd).transpose(1, 2)
        v = self.wv(x).view(b, s, -1, self.hd).transpose(1, 2)
        r = self.nh // self.nkv
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).reshape(b, s, -1))


def make_model():
    torch.manual_seed(0)
    return Attn(d=48, nh=6, nkv=6)


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 5, 48),)
