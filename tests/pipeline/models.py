"""Models whose values cross the stages of a pipeline in awkward ways, in double precision, and their batches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS, ROWS, LENGTH = 8, 20, 8, 5


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def layers(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


class Tied(nn.Module):
    """The table is read by the first and the last stage; the loss is a mean over uneven tokens."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.table, self.layers, self.norm = nn.Embedding(WORDS, WIDTH), layers(depth), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Skips(nn.Module):
    """A skip over all layers, a table of rotations, a mask and counts made on the way; a complex value crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers, self.leave = nn.Linear(WIDTH, WIDTH), layers(), nn.Linear(2 * WIDTH, 2)
        self.register_buffer("rates", torch.arange(1, WIDTH // 2 + 1) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), self.rates).cos().repeat_interleave(2, -1)
        x = self.enter(x)
        first, alive, count = x, x.detach().sum(-1) > -2, (x.detach() > 0).long().sum(-1)
        waves = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        for layer in self.layers:
            x = torch.where(alive.unsqueeze(-1), layer(x * turns), x)
        x = x + torch.view_as_real(waves * waves).flatten(-2) / (1 + count).unsqueeze(-1)
        return self.leave(torch.cat([x, first], -1)).pow(2).mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True), Layer()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.layer(x + self.read(x, memory, memory, need_weights=False)[0])


class Translator(nn.Module):
    """Every decoder layer reads the encoder's result."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.encoder = nn.Embedding(WORDS, WIDTH), layers(3)
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        memory = self.table(ids)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.table(labels.clamp(min=0))
        for block in self.decoder:
            x = block(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Frozen(Tied):
    """Nothing before the last two layers learns, so that no gradient enters their stage."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.table.weight.detach().clone())
        for part in (self.table, self.layers[0], self.layers[1]):
            part.requires_grad_(False)


class Spread(nn.Module):
    """A loss of every layer, a penalty on weights, a layer that is called twice, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers, self.unused = nn.Linear(WIDTH, WIDTH), layers(), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        extra = x.new_zeros(())
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x)
            extra = extra + x.abs().mean()
        return (x * self.scale).pow(2).mean() + 0.1 * extra + 0.01 * self.layers[1].up.weight.pow(2).sum()


class Noisy(Tied):
    """Drops values in every stage."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.table(ids), 0.3, self.training)
        for layer in self.layers:
            x = F.dropout(layer(x), 0.2, self.training)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Scores(Tied):
    """Returns what the caller scores, a mask among it."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:  # type: ignore[override]
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), "x": x, "seen": labels >= 0}


MODELS: dict[str, Callable[[], nn.Module]] = {
    m.__name__.lower(): m for m in (Tied, Skips, Translator, Frozen, Spread, Noisy, Scores)
}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batch(name: str, seed: int = 1) -> dict[str, Tensor]:
    """Token counts differ between rows: one has none, another all."""
    g = torch.Generator().manual_seed(seed)
    if name in ("skips", "spread"):
        return {"x": torch.randn(ROWS, LENGTH, WIDTH, generator=g, dtype=torch.float64)}
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=g)
    labels = torch.randint(0, WORDS, (ROWS, LENGTH), generator=g)
    if name != "scores":
        for row in range(ROWS):
            labels[row, row % (LENGTH + 1) :] = -100
    return {"ids": ids, "labels": labels}
