"""AdamW with decay, no-decay, own-rate and empty groups.

Seen in deepspeedai/DeepSpeed#6878; deepspeedai/DeepSpeed#4277; OpenRLHF/OpenRLHF#1234; MakazhanAlpamys/Soup#336;
open-mmlab/mmengine#1441.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.emb, self.l, self.n = nn.Linear(4, d), nn.Linear(d, d), nn.LayerNorm(d)
        self.act_gain = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.n(self.l(torch.tanh(self.emb(x)) * self.act_gain))


def param_groups(m):
    dec = [p for n, p in m.named_parameters() if p.ndim == 2]
    nod = [p for n, p in m.named_parameters() if p.ndim < 2 and n != "act_gain"]
    return [
        {"params": dec, "weight_decay": 0.5, "lr": 1e-2},
        {"params": nod, "weight_decay": 0.0, "lr": 1e-2},
        {"params": [m.act_gain], "weight_decay": 0.0, "lr": 1e-1},
        {"params": [], "weight_decay": 0.0, "lr": 1e-2},
    ]


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 4),)
