"""What a layer of experts is said to cost, against what its ranks send and hold."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.compile import lower
from autopar.cost.hardware import load as hardware
from autopar.cost.price import Price
from autopar.cost.program import price
from autopar.ir import ops
from autopar.ir.grouped import run_body
from autopar.ir.mesh import Mesh
from autopar.rules.experts import exchange_axis
from autopar.runtime.axis import Axis
from autopar.runtime.dispatch import dispatched_experts
from autopar.runtime.live import Live
from autopar.runtime.load import Loads
from tests.experts.models import EXPERTS, WIDTH, batch, deepseek, squared
from tests.experts.test_processes import RANKS, rows
from tests.experts.test_wire import TOKENS, Wire, even
from tests.ranks import Ranks

INNER, K = 160, 2
BODY = (
    ("linear", (("%", 0), ("%", 1)), ()),
    ("aten.silu.default", (("%", 3),), ()),
    ("linear", (("%", 4), ("%", 2)), ()),
)


def priced(k: int, mesh: str = "ep=4") -> Price:
    """Of the layer with even routing, on a rank."""
    model, x = even(k)
    program = lower(model, (x[:1],), {}, Mesh.parse(mesh), loss=squared, after="reshard")
    return price(program, hardware("h100"))


def sent(k: int) -> int:
    """Bytes of rows that a rank sends in a step."""
    model, x = even(k)
    pm = autopar.parallelize(model, "ep=4", args=(rows(x),), loss=squared)
    with Wire() as wire:
        pm.train_step(rows(x))
    return sum(wire.sent.values())


@pytest.mark.parametrize("k", [1, 2])
def test_traffic_is_that_of_the_wire(ranks: Ranks, k: int) -> None:
    found = [t for t in priced(k).traffic if t.collective == "all_to_all"]
    assert {(t.axis, t.calls) for t in found} == {("ep", 2)} and len(found) == 2
    assert [sum(t.bytes for t in found)] * RANKS == ranks.run(RANKS, sent, k)


def held() -> dict[str, int]:
    """Bytes that a dispatch holds beside its inputs and its result: at its fullest moment forward, and behind it.

    A message may be held a little longer by the thread that sent it, so the least of some runs counts.
    """
    group, draw = dist.group.WORLD, torch.Generator().manual_seed(dist.get_rank())
    assert group is not None
    axis = Axis("ep", RANKS, dist.get_rank(), group.group_name)
    index = (torch.arange(TOKENS)[:, None] + torch.arange(K)) % EXPERTS
    shapes = ((1, INNER, WIDTH), (1, WIDTH, INNER))
    params = [torch.randn(s, requires_grad=True) for s in shapes]
    given = [torch.rand(TOKENS, n, generator=draw).requires_grad_() for n in (WIDTH, K)]
    runs = []
    for _ in range(5):
        with Live([index, *given, *params]) as live:
            base = live.total()
            out = dispatched_experts(
                given[0], index, given[1], params, BODY, torch.float32, None, "moe", None, Loads().at(""), axis
            )
            own = base + out.numel() * out.itemsize
            runs.append({"peak": live.peak - own, "kept": live.total() - own})
            del out
    return {n: min(r[n] for r in runs) for n in runs[0]}


def test_memory_is_what_is_held(ranks: Ranks) -> None:
    row = TOKENS * K * 4
    kept, workspace = row * (2 * WIDTH + 2 * INNER), row * WIDTH
    indices = 5 * 8 * TOKENS * K + 8 * EXPERTS  # int64: no part of the price
    for found in ranks.run(RANKS, held):
        assert kept <= found["kept"] <= kept + indices
        assert kept + workspace <= found["peak"] <= kept + workspace + 2 * indices


def test_gradients_of_experts_are_not_copied() -> None:
    ends, x = torch.tensor([2, 5]), torch.randn(5, 4, requires_grad=True)
    for name, shape in (("linear", (2, 3, 4)), ("matmul", (2, 4, 3))):
        weight = torch.randn(shape, requires_grad=True)
        out = run_body(((name, (("%", 0), ("%", 1)), ()),), x, [weight], ends)
        (grad,) = torch.autograd.grad(out.square().sum(), weight)
        own = [weight[e] if name == "matmul" else weight[e].t() for e in range(2)]
        alone = torch.cat([x[:2] @ own[0], x[2:] @ own[1]]).square().sum()
        torch.testing.assert_close(grad, torch.autograd.grad(alone, weight)[0])
        assert grad.is_contiguous()


@pytest.mark.parametrize("k", [1, 2])
def test_workspace_is_that_of_one_message(k: int) -> None:
    assert priced(k).memory["workspace"] == TOKENS * k * WIDTH * 4
    assert "workspace" not in priced(k, "dp=4").memory


@pytest.mark.parametrize(("tp", "k", "travels"), [(2, 8, False), (4, 8, False), (4, 1, True), (4, 2, True)])
def test_rows_travel_over_tp_where_gathering_them_costs_more(tp: int, k: int, travels: bool) -> None:
    changed = {"num_experts_per_tok": k, "n_routed_experts": 8, "n_group": 1, "hidden_size": 512}
    model = deepseek(**changed, moe_intermediate_size=512, max_position_embeddings=512)
    program = lower(model, (), batch(2, 256), Mesh.parse(f"tp={tp}"), "sequence_parallel", after="reshard")
    (node,) = (n for _, g in program.graphs() for n in g.nodes if n.target is ops.experts)
    assert (exchange_axis(node) == "tp") == travels


def load_over_tp() -> Any:
    """The load where tokens travel over tp, and what the same model's is on ep."""
    given = batch(4, 16)
    model = deepseek(num_experts_per_tok=1, hidden_size=64, moe_intermediate_size=64)
    out = []
    for mesh, strategy, mine in (("tp=2", "sequence_parallel", given), ("ep=2", "", rows(given, 2))):
        pm = autopar.parallelize(model, mesh, kwargs=mine, strategy=strategy)
        pm.train_step(**mine)
        ((path, load),) = pm.expert_load().items()
        out.append((path, load.tokens.tolist(), load.ranks.tolist()))
    return out


def test_load_where_tokens_travel_over_tp(ranks: Ranks) -> None:
    for over_tp, over_ep in ranks.run(2, load_over_tp, timeout=120.0):
        assert over_tp == over_ep and len(over_tp[2]) == 2
