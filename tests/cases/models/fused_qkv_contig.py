"""One Linear producing [Q|K|V] that is chunked in three. A plain contiguous column shard scrambles heads without
raising.

Seen in pytorch/pytorch#140069; pytorch/pytorch#149701; deepspeedai/DeepSpeed#3844.
"""

import torch
import torch.nn.functional as F
from torch import nn


class FusedAttn(nn.Module):
    def __init__(self, d=32, nh=4):
        super().__init__()
        self.nh, self.hd = nh, d // nh
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(b, s, self.nh, self.hd).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(o.transpose(1, 2).reshape(b, s, d))


def make_model():
    torch.manual_seed(0)
    return FusedAttn()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 6, 32),)
