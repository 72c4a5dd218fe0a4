"""Models and what is compared before and after a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from tests.llama import llama as small

WIDTH, VOCABULARY = 16, 24


class Fused(nn.Module):
    """Tied, with fused q, k, v, grouped queries, dropout, a buffer, frozen, 0-d, odd and empty parameters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 4 * 4 + 2 * 2 * 4), nn.Linear(16, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 10), nn.Linear(10, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        h = self.embed(ids)
        b, s, _ = h.shape
        q, k, v = self.qkv(h).split([16, 8, 8], -1)
        q, k, v = (x.view(b, s, -1, 4).transpose(1, 2) for x in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + self.drop(self.o(a.transpose(1, 2).reshape(b, s, -1)))
        gate, up = self.gate_up(h * self.frozen).chunk(2, -1)
        h = h + self.down(F.silu(gate) * up) * self.scale + self.empty.sum()
        logits = self.head(h)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def fused(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Fused(dropout)


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 20, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return small(seed=seed, **{**sizes, **heads, **changes})


MODELS: dict[str, Callable[..., Any]] = {"llama": llama, "fused": fused}


def batch(model: str, seed: int, rows: int = 4) -> dict[str, Tensor]:
    """The whole batch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, 6), generator=generator)
    labels = torch.randint(0, VOCABULARY, (rows, 6), generator=generator)
    return {"input_ids" if model == "llama" else "ids": ids, "labels": labels}


def mine(values: dict[str, Tensor], mesh: str) -> dict[str, Tensor]:
    """This data rank's rows."""
    sizes = Mesh.parse(mesh)
    index = sizes.data_rank(sizes.coordinates(dist.get_rank() if dist.is_initialized() else 0))
    return {n: t.tensor_split(sizes.data_size)[index] for n, t in values.items()}


def parallel(model: str, mesh: str, seed: int = 0, strategy: str = "", **options: Any) -> Any:
    module = MODELS[model](seed=seed, **options)
    return autopar.parallelize(module, mesh, kwargs=mine(batch(model, 0), mesh), strategy=strategy)


def adamw(pm: nn.Module) -> torch.optim.Optimizer:
    """Two groups: one of vectors without decay, with another learning rate."""
    named = [(n, p) for n, p in pm.named_parameters() if p.requires_grad]
    flat = [p for _, p in named if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": [p for _, p in named if p.dim() >= 2]}, {"params": flat, "lr": 3e-2, "weight_decay": 0.0}], lr=1e-2
    )


def train(pm: Any, optimizer: Any, model: str, mesh: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(float(pm.train_step(**mine(batch(model, step), mesh))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def unsharded(x: Tensor) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def moments(pm: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Every state tensor of the optimizer, whole, by name. Collective."""
    states = ((n, optimizer.state.get(p, {})) for n, p in pm.named_parameters())
    return {f"{n}/{k}": unsharded(v) for n, s in states for k, v in sorted(s.items())}


def agree(got: dict[str, Tensor], want: dict[str, Tensor], within: float = 0.0) -> None:
    assert sorted(got) == sorted(want)
    for name, w in want.items():
        torch.testing.assert_close(got[name], w, rtol=within, atol=within, msg=lambda m, n=name: f"{n}: {m}")
