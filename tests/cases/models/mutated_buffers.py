"""Forward updates buffers in place (step counter, running max, int cache write): mutation must happen exactly once per
forward on every rank and per microbatch in order.

Seen in pytorch/torchtitan#1114; huggingface/transformers#36652; facebookresearch/fairscale#68.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.a, self.b = nn.Linear(d, 32), nn.Linear(32, d)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("amax", torch.zeros(32))

    def forward(self, x):
        h = self.a(x)
        self.steps += 1
        self.amax.copy_(torch.maximum(self.amax, h.detach().abs().amax(0)))
        return self.b(h / (1 + self.amax)) * self.steps


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)
