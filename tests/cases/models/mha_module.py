"""nn.MultiheadAttention / TransformerEncoderLayer: packed in_proj_weight is a bare Parameter, (S,B,E) layout, and eval
mode takes a fused fast path.

Seen in pytorch/pytorch#94421; pytorch/PiPPy#634; huggingface/transformers#28003.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.mha = nn.MultiheadAttention(32, 4, batch_first=False)

    def forward(self, x):
        x = self.enc(x)
        t = x.transpose(0, 1)
        y, w = self.mha(t, t, t, need_weights=True)
        return y.transpose(0, 1), w


def make_model():
    torch.manual_seed(0)
    return Net().train()


def make_inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 5, 32),)
