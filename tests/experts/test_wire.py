"""What travels between ranks for a layer of experts, counted where it leaves: rows of tokens, there and back."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.ir.grouped import experts
from autopar.runtime.axis import Axis
from autopar.runtime.collectives import all_gather, reduce_scatter
from autopar.runtime.dispatch import dispatched_experts
from autopar.runtime.load import Loads
from tests.experts.models import EXPERTS, WIDTH, Moe, squared
from tests.experts.test_processes import RANKS, rows
from tests.ranks import Ranks

TOKENS = 2 * EXPERTS  # of a rank
BODY = (
    ("matmul", (("%", 0), ("%", 1)), ()),
    ("aten.silu.default", (("%", 3),), ()),
    ("matmul", (("%", 4), ("%", 2)), ()),
)


class Wire(TorchDispatchMode):
    """Bytes of rows of tokens that this rank sends to others, by the name of the collective, and its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.sent, self.calls = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and args and args[0].dim() > 1 and args[0].shape[-1] == WIDTH:
            away = {
                "all_to_all_single": lambda x, receive, send, group: len(x) - send[self.rank],
                "all_gather_into_tensor": lambda x, *rest: len(x) * (self.world - 1),
                "reduce_scatter_tensor": lambda x, *rest: len(x) * (self.world - 1) // self.world,
            }
            if name in away:
                self.sent[name] += away[name](*args) * args[0][:1].numel() * args[0].itemsize
                self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def even(k: int) -> tuple[nn.Module, Tensor]:
    """Token j chooses the experts j, j+1, ... modulo their number; a product before lets gradients flow to tokens."""
    moe = Moe(k=k).eval()
    x = torch.zeros(RANKS, TOKENS, WIDTH)
    with torch.no_grad():
        moe.bias.zero_()
        moe.router.weight.zero_()
        for e in range(EXPERTS):
            for j in range(k):
                moe.router.weight[(e + j) % EXPERTS, e] = 3.0 - j
            x[:, e::EXPERTS, e] = 1.0
        first = nn.Linear(WIDTH, WIDTH, bias=False)
        first.weight.copy_(torch.eye(WIDTH))
    return nn.Sequential(first, moe), x


def sent(strategy: str, k: int) -> tuple[dict[str, int], dict[str, int], dict[str, Any]]:
    """What a rank sends in a step, and the load of the experts."""
    moe, x = even(k)
    pm = autopar.parallelize(moe, "ep=4", args=(rows(x),), loss=squared, strategy=strategy)
    with Wire() as wire:
        pm.train_step(rows(x))
    load = {n: (o.tokens, o.ranks, o.imbalance) for n, o in pm.expert_load().items()}
    return dict(wire.sent), dict(wire.calls), load


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("strategy", ["", "expert_capacity=1"])
def test_bytes_of_a_step(ranks: Ranks, strategy: str, k: int) -> None:
    once = TOKENS * k * WIDTH * 4 * (RANKS - 1) // RANKS
    for bytes_, calls, load in ranks.run(RANKS, sent, strategy, k):
        assert bytes_ == {"all_to_all_single": 4 * once}  # there and back, forward and backward
        assert calls == {"all_to_all_single": 4}
        ((counts, busy, imbalance),) = load.values()
        assert counts.tolist() == [TOKENS * k] * EXPERTS and busy.tolist() == [TOKENS * k] * RANKS and imbalance == 1


def both(k: int) -> tuple[int, int, float]:
    """Bytes of rows that travel, and bytes where all tokens are gathered instead; the difference of the gradients."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    axis, draw = Axis("ep", RANKS, rank, group.group_name), torch.Generator().manual_seed(rank)
    place = torch.arange(TOKENS)[:, None]
    index, weights = (place + torch.arange(k)) % EXPERTS, torch.rand(TOKENS, k, generator=draw)
    params = [torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) * 0.3] * 2
    mine = [p.chunk(RANKS)[rank] for p in params]
    hidden = [torch.randn(TOKENS, WIDTH, generator=draw).requires_grad_()]
    hidden.append(hidden[0].detach().clone().requires_grad_())
    with Wire() as travel:
        y = dispatched_experts(
            hidden[0], index, weights, mine, BODY, torch.float32, None, "moe", None, Loads().at(""), axis
        )
        y.square().sum().backward()
    with Wire() as gather:
        everywhere = [all_gather(t, 0, axis) for t in (hidden[1], index, weights)]
        terms = experts(*everywhere, mine, BODY, torch.float32, first=rank * EXPERTS // RANKS)
        reduce_scatter(terms, 0, axis).square().sum().backward()
    assert hidden[0].grad is not None and hidden[1].grad is not None
    apart = float((hidden[0].grad - hidden[1].grad).abs().max())
    return sum(travel.sent.values()), sum(gather.sent.values()), apart


@pytest.mark.parametrize("k", [1, 2, 3])
def test_against_gathering_all_tokens(ranks: Ranks, k: int) -> None:
    for travel, gather, apart in ranks.run(RANKS, both, k):
        assert gather == 4 * TOKENS * (RANKS - 1) * WIDTH * 4  # each way T(N-1)H, forward and backward
        assert travel * RANKS == gather * k  # each way TkH(N-1)/N: k/N of that
        assert apart < 1e-4
