"""Tiny models that the passes and their checks are tested on, each with sizes that matter for one way of sharding."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.base import Context
from autopar.passes.pipeline import run
from autopar.trace import trace

WIDTH, INNER, VOCABULARY, TOKENS, ROWS = 16, 32, 24, 6, 2
Case = tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor] | None]


class Mlp(nn.Module):
    """Two products with biases, a norm before them and a residual around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GatedMlp(nn.Module):
    """One weight for gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """Causal attention with one weight for queries, keys and values, keys in fewer heads where ``groups`` says so."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, WIDTH // heads
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * groups * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        widths = [WIDTH, self.groups * self.size, self.groups * self.size]
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(widths, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    """Attention with a weight for each of queries, keys and values."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, WIDTH // heads
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, groups * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """Embedding, layers, norm, and a head that is the embedding (or not), with the mean loss of the tokens."""

    def __init__(self, layers: list[nn.Module], tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Both(nn.Module):
    """Fused attention and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(4, 4), GatedMlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


def hidden() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, TOKENS, WIDTH)}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    return {"ids": ids, "labels": ids.clone()}


def squares(out: Tensor) -> Tensor:
    return (out**2).sum()


def llama() -> Case:
    """The Hugging Face Llama with two layers and two query heads to a key head."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}, None


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: (Mlp(), hidden(), squares),
    "gated": lambda: (GatedMlp(), hidden(), squares),
    "fused": lambda: (Attention(4, 4), hidden(), squares),
    "fused-grouped": lambda: (Attention(4, 2), hidden(), squares),
    "grouped": lambda: (Grouped(4, 2), hidden(), squares),
    "tied": lambda: (Language([Mlp(), Mlp()]), tokens(), None),
    "fused-tied": lambda: (Language([Both(), Both()]), tokens(), None),
    "llama": llama,
}


@cache
def traced(name: str, mesh: str, rows: tuple[int, ...] | None = None) -> Program:
    """The TRACED program of a case, made once: clone it before you change it."""
    torch.manual_seed(0)
    model, kwargs, loss = CASES[name]()
    return trace(model, (), kwargs, mesh=Mesh.parse(mesh), rows=rows, loss=loss).program


@cache
def planned(name: str, mesh: str, pipeline: str, rows: tuple[int, ...] | None = None) -> Program:
    """The case after a pipeline, made once: clone it before you change it."""
    return run(traced(name, mesh, rows), pipeline)


def local(name: str, mesh: str, pipeline: str, rank: int = 0, rows: tuple[int, ...] | None = None) -> Program:
    """The LOCAL program of a rank; the pipeline ends with reshard."""
    program = planned(name, mesh, pipeline, rows)
    return run(program, "localize", Context(at=program.mesh.coordinates(rank)))
