"""kwargs-only call, nested dict input, dataclass/dict output with optional None field: the parallel module must return
the same structure on the ranks that own the output.

Seen in pytorch/pytorch#142161; pytorch/pytorch#160241; allenai/allennlp#3574.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.a, self.b = nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, batch, *, scale=None, return_hidden=False):
        h = F.relu(self.a(batch["x"]["feat"]))
        y = self.b(h)
        if scale is not None:
            y = y * scale
        return {"logits": y, "hidden": [h] if return_hidden else None, "aux": (batch["y"], 3)}


def make_model():
    torch.manual_seed(0)
    return Net()


def make_inputs():
    torch.manual_seed(1)
    return ({"x": {"feat": torch.randn(4, 16)}, "y": torch.arange(4)},)


def make_kwargs():
    return {"scale": torch.tensor(0.5), "return_hidden": True}


def loss(out):
    return out["logits"].pow(2).mean() * 10
