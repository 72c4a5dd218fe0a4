"""GQA with fewer kv heads than tp ranks: k/v heads must be replicated (and their grads reduced), not cut mid-head.

Seen in huggingface/transformers#48307; pytorch/torchtitan#2574; pytorch/torchtitan#2577.
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.att = Attn(d=64, nh=8, nkv=2)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        x = x + self.att(x)
        return x + self.down(F.gelu(self.up(x)))


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 6, 64),)
