"""Models of the public API's tests."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
BITS = 16  # a mask of so many features is a whole number that float32 holds


class Mlp(nn.Module):
    """Two projections; the output has no loss."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Self-attention of ``heads`` heads."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, width = heads, 8 * heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (m(x).view(b, s, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d))


@dataclass
class Output:
    """What Lm returns."""

    loss: Tensor | None
    logits: Tensor
    extra: dict[str, Any]


class Lm(nn.Module):
    """A tied language model of equal layers with dropout, batch statistics and a buffer; returns a dataclass."""

    def __init__(self, vocabulary: int = 24, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Mlp() for _ in range(layers))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        self.calls.zero_()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Output:
        self.calls += 1
        h = self.embed(ids)
        for layer in self.layers:
            h = self.drop(layer(h))
        logits = self.head(h)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits, {"mean": h.pow(2).mean(), "none": None})


@torch.library.custom_op("autopar_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    """An op that no rule can know: every value of the last dim depends on all that come before."""
    return x.cumsum(-1)


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _mystery_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad.flip(-1).cumsum(-1).flip(-1)


mystery.register_autograd(_mystery_backward)


class Odd(nn.Module):
    """Has an op without a rule between a column and a row product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(mystery(self.up(x)))


class Dropped(nn.Module):
    """Dropout of hidden features, all 1, and of the output. Returns the masks of the features' halves as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * BITS), nn.Linear(2 * BITS, WIDTH)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)
        nn.init.zeros_(self.up.weight)
        nn.init.ones_(self.up.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inner(self.up(x))
        halves = hidden.view(*hidden.shape[:-1], 2, BITS)
        return (halves * (2.0 ** torch.arange(BITS) / 2)).sum(-1), self.outer(self.down(hidden))


class DroppedTokens(nn.Module):
    """Dropout between a row product and a norm: with sequence parallelism, on each rank's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = self.drop(self.down(F.gelu(self.up(x))))
        return dropped, self.n(x + dropped)


def seeded(make: Any, *args: Any, **kwargs: Any) -> Any:
    """A model with the same weights every time."""
    torch.manual_seed(0)
    return make(*args, **kwargs)


def batch(rows: int = 4, length: int = 6, seed: int = 1) -> dict[str, Tensor]:
    """Ids and labels of the whole batch for Lm."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 24, (rows, length), generator=generator)
    return {"ids": ids, "labels": torch.randint(0, 24, (rows, length), generator=generator)}


def features(*shape: int, seed: int = 1) -> Tensor:
    """Random numbers of ``shape``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def squares(out: Any) -> Tensor:
    """A loss for models without one."""
    return out.pow(2).mean()
