"""Vocab 51 on tp=2 with padding_idx and ignore_index: padded logit columns must not enter the softmax, padding row
keeps zero grad.

Seen in NVIDIA/Megatron-LM#1754; hpcaitech/ColossalAI#6167; bigscience-workshop/Megatron-DeepSpeed#394.
"""

import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self, V=51, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d))
        self.head = nn.Linear(d, V, bias=True)

    def forward(self, ids, labels):
        h = self.emb(ids)
        logits = self.head(h + self.mlp(h))
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def make_model():
    torch.manual_seed(0)
    return LM()


def make_inputs():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 51, (2, 9), generator=g)
    ids[0, -1] = 50
    ids[1, 0] = 0
    lab = torch.randint(0, 51, (2, 9), generator=g)
    lab[0, :4] = -100
    lab[1, 2] = 50
    return ids, lab


def loss(out):
    return out[1]
