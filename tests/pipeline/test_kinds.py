"""Kinds of models that a pipeline once refused or got wrong: all ranks in one process, or a pair of processes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.emit.owned import owned
from tests.pipeline.models import LENGTH, ROWS, WIDTH, layers
from tests.ranks import Ranks


class Heads(nn.Module):
    """Heads that come first, and layers behind the loss, which only the outputs read; a weight among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.after, self.enter = nn.Linear(WIDTH, 3), layers(2), nn.Linear(WIDTH, WIDTH)
        self.layers, self.leave = layers(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = y = self.enter(x)
        for layer in self.layers:
            x = y = layer(x)
        for layer in self.after:
            y = layer(y)
        loss = self.leave(x).pow(2).mean()
        return {"loss": loss, "scores": self.extra(x), "y": y, "weight": self.enter.weight.t()}


class Bare(nn.Module):
    """No modules: parameters and fixed tables of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH, generator=g) / 3) for _ in range(2))
        for i in range(2):
            self.register_buffer(f"table{i}", torch.randn(WIDTH, WIDTH, generator=g) / 3)

    def forward(self, x: Tensor) -> Tensor:
        for i, weight in enumerate(self.weights):
            x = x + torch.tanh(x @ weight)
            x = x + torch.tanh(x @ getattr(self, f"table{i}"))
        return 1 - x.pow(2).mean()


class Deep(nn.Module):
    """Losses of all layers, added up from zero, with numbers among them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers, self.head = nn.Linear(WIDTH, WIDTH), layers(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, losses = self.enter(x), []
        for layer in self.layers:
            x = layer(x)
            losses.append(1.5 - torch.cosine_similarity(self.head(x), x[..., :3], dim=-1).mean())
        total: Tensor = sum(losses) - 0.25  # type: ignore[assignment]
        return total


class Added(nn.Module):
    """Parameters added to one another, whose gradients are one tensor where a microbatch has one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.ones(1, 1 + LENGTH, WIDTH))
        self.kinds = nn.Parameter(torch.ones(1, 1 + LENGTH, WIDTH))
        self.enter, self.layers, self.leave = nn.Linear(WIDTH, WIDTH), layers(2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(len(x), -1, -1), self.enter(x)], 1) + (self.places + self.kinds)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x).pow(2).mean()


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def given() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "mesh", "strategy"),
    [
        (Heads, "pp=2", "microbatches=4"),
        (Heads, "pp=2", "schedule=zbv,microbatches=2"),
        (Bare, "pp=4", "microbatches=2"),
        (Deep, "pp=2", "microbatches=4"),
        (Added, "tp=2", "microbatches=8"),
        (Added, "pp=2,tp=2", "microbatches=8,schedule=zbv"),
    ],
)
def test_equals_the_unsharded_model(kind: type[nn.Module], mesh: str, strategy: str) -> None:
    report = autopar.verify(made(kind), mesh, (given(),), strategy=strategy)
    assert report.ok, str(report)


def scaled() -> dict[str, Any]:
    pm = autopar.parallelize(made(Added), "pp=2", args=(given(),), strategy="schedule=zbv,microbatches=8")
    pm.train_step(given())
    pm.clip_grad_norm_(1e-3)
    return pm.full_gradients()


def test_gradients_are_scaled_once(ranks: Ranks) -> None:
    """Norms are clipped in place, so no two parameters may hold one gradient."""
    plain = made(Added)
    plain(given()).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    for got in ranks.run(2, scaled):
        for name, p in plain.named_parameters():
            torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-12)


class _Reader(torch.autograd.Function):
    kept: list[bool] = []

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        _Reader.kept = [a is g for a, g in zip(owned(grads), grads)]
        return grads


def test_only_shared_gradients_are_copied() -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    w, b, first = leaf(3, 4), leaf(3), leaf(1, 4)
    torch.nn.functional.linear(torch.randn(5, 4), *_Reader.apply(w, b)).pow(2).sum().backward()
    assert _Reader.kept == [True, True]
    x, y = _Reader.apply(first, leaf(1, 4))
    (x + y).pow(2).sum().backward()
    assert _Reader.kept == [False, False]
    torch.stack(_Reader.apply(leaf(3), leaf(3))).pow(2).sum().backward()
    assert _Reader.kept == [False, False]


def test_microbatches_suit_the_schedule(ranks: Ranks) -> None:
    """Seven divide fourteen rows, but do not run in equal rounds on two ranks."""
    assert ranks.run(2, chosen) == [2, 2]


def chosen() -> int:
    x = torch.cat([given(), given()])[:14]
    pm = autopar.parallelize(made(Deep), "pp=2", args=(x,), strategy="schedule=interleaved")
    assert pm._program.stages is not None
    return pm._program.stages.microbatches
