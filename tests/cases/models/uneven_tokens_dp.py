"""dp ranks hold 23 and 2 valid tokens: averaging per-rank token means (or micro-step means) is not the global token
mean.

Seen in huggingface/transformers#24725; huggingface/transformers#34191; meta-pytorch/torchtune#1875;
pytorch/torchtitan#2206; verl-project/verl#3994.
"""

import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self, V=16, d=12):
        super().__init__()
        self.emb, self.l, self.head = nn.Embedding(V, d), nn.Linear(d, d), nn.Linear(d, V)

    def forward(self, ids, labels):
        return F.cross_entropy(
            self.head(torch.tanh(self.l(self.emb(ids)))).flatten(0, 1), labels.flatten(), ignore_index=-100
        )


def make_model():
    torch.manual_seed(0)
    return LM()


def make_inputs():
    g = torch.Generator().manual_seed(1)
    i = torch.randint(0, 16, (4, 12), generator=g)
    l = i.clone()
    l[1, 11:] = -100
    l[2, 1:] = -100
    l[3, 1:] = -100
    return i, l


def loss(out):
    return out * 10
