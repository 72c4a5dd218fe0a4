"""Input embedding tied to lm head: sharding must treat them as one parameter (one shard layout, summed grad) and stay
tied after an optimizer step and meta-device init.

Seen in pytorch/torchtitan#2252; foundation-model-stack/foundation-model-stack#331; deepspeedai/DeepSpeed#8582;
facebookresearch/fairseq2#1380.
"""

import torch
import torch.nn.functional as F
from torch import nn


class TiedLM(nn.Module):
    def __init__(self, V=40, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.fc1, self.fc2 = nn.Linear(d, 32), nn.Linear(32, d)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, V, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        h = self.emb(ids)
        h = h + self.fc2(F.gelu(self.fc1(h)))
        return self.head(self.norm(h))


def make_model():
    torch.manual_seed(0)
    return TiedLM()


def make_inputs():
    g = torch.Generator().manual_seed(1)
    return (torch.randint(0, 40, (2, 7), generator=g),)
