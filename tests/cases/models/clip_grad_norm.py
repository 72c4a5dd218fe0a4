"""Global grad-norm clipping with sharded (Linear) and replicated (norm, bias) params: replicated ones counted once,
result independent of tp; must not raise on mixed meshes.

Seen in pytorch/pytorch#180346; NVIDIA-NeMo/RL#3788; meta-pytorch/torchtune#2420; huggingface/transformers#36132;
NVIDIA/Megatron-LM#5916.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.scale * self.fc2(F.gelu(self.fc1(self.norm(x))))


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 5, 16),)


def loss(out):
    return out.pow(2).sum()
