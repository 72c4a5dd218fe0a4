"""Tied embedding whose 7 rows do not divide over dp=4: every row must move.

Seen in pytorch/pytorch#176076; pytorch/pytorch#176257.
"""

import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, V=7, d=6):
        super().__init__()
        self.emb, self.l, self.head = nn.Embedding(V, d), nn.Linear(d, d), nn.Linear(d, V, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.l(self.emb(ids))))


def make_model():
    torch.manual_seed(0)
    return LM()


def make_inputs():
    return (torch.arange(28).reshape(4, 7) % 7,)
