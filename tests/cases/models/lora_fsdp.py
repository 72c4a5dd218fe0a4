"""LoRA on every layer of a frozen base: all adapters must receive gradients.

Seen in meta-pytorch/torchforge#592; mosaicml/llm-foundry#414; Lightning-AI/litgpt#1417.
"""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, d=12, r=2):
        super().__init__()
        self.base = nn.Linear(d, d)
        self.base.requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(r, d) * 0.1), nn.Parameter(torch.randn(d, r) * 0.1)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + (x @ self.A.T) @ self.B.T)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 12)
        self.inp.requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        x = self.inp(x)
        for l in self.layers:
            x = l(x)
        return x


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)
