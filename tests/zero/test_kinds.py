"""Every kind of parameter under every stage, on real gloo processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir.mesh import Mesh
from tests.ranks import Ranks

WIDTH, RANKS = 12, 4


class OddLayer(nn.Module):
    """Two dtypes, a scalar, one element, none, a leading dim of 1, odd sizes, a frozen and an unused one."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.wide = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.ones(1))
        self.place = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5, 2))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x + self.place) * self.single)) * self.scale + self.frozen
        z = (x.double() @ self.wide).sum(-1, keepdim=True).float()
        return x + y * torch.sigmoid(z) + self.shared + self.empty.sum()


class Odd(nn.Module):
    """Equal layers that share a parameter, which the outer function reads as well."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.randn(WIDTH))
        self.embed = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(OddLayer(shared) for _ in range(2))
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.layers[0].shared)


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


def ids(seed: int) -> Tensor:
    return torch.randint(0, 9, (8, 3), generator=torch.Generator().manual_seed(seed))


def loss(out: Tensor) -> Tensor:
    return out.float().pow(2).mean()


def trained(mesh: str, strategy: str) -> Any:
    """Gradients of the first step, then losses, parameters, and elements held, after three steps."""
    sizes = Mesh.parse(mesh)
    index = sizes.data_rank(sizes.coordinates(dist.get_rank()))

    def mine(seed: int) -> Tensor:
        return ids(seed).tensor_split(sizes.data_size)[index]

    pm = autopar.parallelize(odd(), mesh, args=(mine(0),), loss=loss, strategy=strategy)
    opt = torch.optim.AdamW((p for p in pm.parameters() if p.requires_grad), lr=1e-2, foreach=False)
    losses, grads = [], {}
    for step in range(3):
        losses.append(float(pm.train_step(mine(step))))
        grads = grads or pm.full_gradients()
        norm = pm.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
    held = {n: (p.to_local() if isinstance(p, DTensor) else p).numel() for n, p in pm.named_parameters()}
    return losses, grads, pm.full_parameters(), float(norm), held


def reference() -> Any:
    model = odd()
    opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, foreach=False)
    losses, grads = [], {}
    for step in range(3):
        value = loss(model(ids(step)))
        value.backward()
        losses.append(float(value.detach()))
        grads = grads or {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        opt.step()
        opt.zero_grad()
    return losses, grads, {n: p.detach() for n, p in model.named_parameters()}, float(norm)


STRATEGIES = [
    "",
    "zero=1,microbatches=2",
    "zero=2",
    "zero=3",
    "zero=3,zero_shard_size=2,recompute=full",
    "zero=3,offload=cpu",
]


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2", "tp=2,dp=2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_odd_parameters(ranks: Ranks, mesh: str, strategy: str) -> None:
    losses, grads, params, norm = reference()
    if strategy.endswith("size=2,recompute=full") and mesh != "dp=4":
        strategy = strategy.replace("zero_shard_size=2", "prefetch=1")
    found = [a.value for a in answered(ranks, mesh, strategy)]
    for got_losses, got_grads, got_params, got_norm, _ in found:
        torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=1e-6)
        assert got_norm == pytest.approx(norm, rel=1e-4)
        assert got_grads.keys() == grads.keys()
        for name, want in grads.items():
            assert (got_grads[name] is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(
                    got_grads[name], want, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
        for name, want in params.items():
            torch.testing.assert_close(got_params[name], want, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    if strategy == "zero=3" and mesh == "dp=4":
        held = [f[-1] for f in found]
        assert {h["layers.0.place"] for h in held} == {3 * WIDTH // RANKS}  # cut along the dim that divides
        assert sorted(h["layers.0.unused"] for h in held) == [0, 2, 4, 4]
        assert {h["layers.0.scale"] for h in held} == {1}


def answered(ranks: Ranks, mesh: str, strategy: str) -> list[Any]:
    """The answers of all ranks; warnings about weights that tp holds whole are expected of this model."""
    answers = ranks.answers(RANKS, trained, mesh, strategy, timeout=120.0)
    for rank, answer in enumerate(answers):
        if answer.error is not None:
            answer.error.add_note(f"on rank {rank}:\n{answer.trace}")
            raise answer.error
    return answers
