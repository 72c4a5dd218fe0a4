"""A real model against torch's own counters: flops of every matmul, bytes that autograd keeps."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost import load, price
from autopar.cost.compute import node_cost
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.trace import trace


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, h))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32, vocabulary: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Sequential(Attention(width, 4), Gated(width)) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten(), reduction="mean")


@pytest.fixture(scope="module")
def case() -> tuple[Model, Tensor, Program]:
    model, ids = Model(), torch.arange(2 * 24).view(2, 24)
    return model, ids, trace(model, (ids,), {}, mesh=Mesh.of({}), rows=None, train=True).program


def weighted(program: Program) -> Iterator[tuple[fx.Node, int]]:
    for name, graph in program.graphs():
        for node in graph.nodes:
            yield node, len(program.calls_of(name)) if name else 1


def test_matmul_flops_are_what_torch_counts(case: tuple[Model, Tensor, Program]) -> None:
    model, ids, program = case
    with FlopCounterMode(display=False) as counter:
        loss = model(ids)
        forward = counter.get_total_flops()
        loss.backward()
    costs = [(node_cost(n), times) for n, times in weighted(program)]
    matmuls = [(c, times) for c, times in costs if c.kind == "matmul"]
    assert sum(times for _, times in matmuls) == 5 * 3 + 1
    assert sum(c.flops * times for c, times in matmuls) == forward
    assert sum(c.backward_flops * times for c, times in matmuls) == counter.get_total_flops() - forward
    attention = [(c, times) for c, times in costs if c.kind == "attention"]
    assert sum(c.flops * times for c, times in attention) == 3 * (4 * 2 * 4 * 24 * 24 * 8) / 2


def test_activations_are_what_autograd_keeps(case: tuple[Model, Tensor, Program]) -> None:
    model, ids, program = case
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), ids)}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(ids)
    assert price(program, load("cpu")).memory["activations"] == pytest.approx(sum(kept.values()), rel=0.01)


def test_parameters(case: tuple[Model, Tensor, Program]) -> None:
    model, _, program = case
    found = price(program, load("cpu")).memory
    assert found["parameters"] == found["gradients"] == sum(p.numel() * 4 for p in model.parameters())
