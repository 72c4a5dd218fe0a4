"""Flops and bytes of each op by its formula, and the roofline."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.cost import load
from autopar.cost.compute import NodeCost, efficiency, node_cost, seconds
from autopar.ir import ops
from autopar.ir.layout import I, Layout, P
from tests.cost.build import Builder

aten = torch.ops.aten
HALF = torch.bfloat16


def node(target: Any, *args: Any, diff: bool = True, inputs_diff: bool = True, **kwargs: Any) -> fx.Node:
    """A node whose tuple arguments are tensors of that shape."""
    build = Builder()

    def tensor(arg: Any) -> Any:
        if not isinstance(arg, tuple):
            return arg
        made = build.placeholder("x", arg, HALF, Layout())
        made.meta["diff"] = inputs_diff
        return made

    return build.call(target, *map(tensor, args), diff=diff, **kwargs)


SIZES = st.integers(1, 7)


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, SIZES)
def test_matmuls(b: int, m: int, n: int, k: int) -> None:
    """Every way to write b matmuls of m×k by k×n costs 2bmnk, and twice that backward."""
    flops, moved = 2 * b * m * n * k, 2 * (b * m * k + b * m * n)
    for cost, weights in [
        (node_cost(node(aten.linear.default, (b, m, k), (n, k))), 1),
        (node_cost(node(aten.mm.default, (b * m, k), (k, n))), 1),
        (node_cost(node(aten.addmm.default, (n,), (b * m, k), (k, n))), 1),
        (node_cost(node(aten.matmul.default, (b, m, k), (k, n))), 1),
        (node_cost(node(aten.bmm.default, (b, m, k), (b, k, n))), b),
        (node_cost(node(aten.matmul.default, (b, m, k), (b, k, n))), b),
    ]:
        assert (cost.flops, cost.backward_flops) == (flops, 2 * flops)
        assert cost.bytes == moved + 2 * weights * k * n
        assert cost.matmul == (m if weights == b and b > 1 else b * m, n, k)


def test_linear_with_bias_and_without_input_gradient() -> None:
    cost = node_cost(node(aten.linear.default, (4, 8), (16, 8), (16,)))
    assert cost.flops == 2 * 4 * 8 * 16
    build = Builder()
    x = build.placeholder("x", (4, 8), HALF, Layout())
    w = build.placeholder("w", (16, 8), HALF, Layout())
    x.meta["diff"] = False
    assert node_cost(build.call(aten.linear.default, x, w)).backward_flops == cost.flops


def test_no_gradient_no_backward() -> None:
    for target, args in [
        (aten.linear.default, ((4, 8), (16, 8))),
        (aten.exp.default, ((4, 8),)),
        (ops.attention, ((1, 2, 4, 8),) * 3),
    ]:
        cost = node_cost(node(target, *args, diff=False))
        assert cost.flops > 0 and cost.bytes > 0
        assert cost.backward_flops == cost.backward_bytes == 0


def test_convolution_counts_the_receptive_field() -> None:
    one = [1, 1]
    cost = node_cost(
        node(aten.convolution.default, (2, 6, 10, 10), (8, 3, 5, 5), None, one, [0, 0], one, False, [0, 0], 2)
    )
    assert cost.flops == 2 * (2 * 8 * 6 * 6) * (3 * 5 * 5)


def test_attention() -> None:
    b, h, s, t, d = 2, 6, 8, 10, 4
    q, kv = (b, h, s, d), (b, h, t, d)
    full = node_cost(node(ops.attention, q, kv, kv))
    assert full.flops == 2 * b * h * s * t * d * 2
    assert full.backward_flops == 2.5 * full.flops
    assert full.bytes == 2 * (2 * b * h * s * d + 2 * b * h * t * d)
    causal = node_cost(node(ops.attention, q, q, q, is_causal=True))
    assert 2 * causal.flops == node_cost(node(ops.attention, q, q, q)).flops
    dropped = node_cost(node(ops.attention, q, q, q, None, 0.5, True))
    assert dropped.flops == 2 * causal.flops
    assert dropped.bytes > causal.bytes + 2 * b * h * s * s


def test_grouped_queries_cost_the_flops_of_all_heads() -> None:
    few = node_cost(node(ops.attention, (2, 6, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4), enable_gqa=True))
    many = node_cost(node(ops.attention, *((2, 6, 8, 4),) * 3))
    assert few.flops == many.flops
    assert few.bytes < many.bytes


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.reshape.default, ([32],)),
        (aten.transpose.int, (0, 1)),
        (aten.expand.default, ([3, 4, 8],)),
        (aten.split_with_sizes.default, ([2, 6], 1)),
        (ops.convert, ("tp", P, I)),
    ],
)
def test_views_and_conversions_are_free(target: Any, args: Any) -> None:
    assert node_cost(node(target, (4, 8), *args)) == NodeCost()


def test_elementwise_and_reductions_move_their_tensors() -> None:
    add = node_cost(node(aten.add.Tensor, (4, 8), (4, 8)))
    assert (add.flops, add.bytes) == (32, 3 * 64)
    assert add.backward_bytes == 3 * 64 + 2 * 64
    total = node_cost(node(aten.sum.dim_IntList, (4, 8), [1]))
    assert (total.flops, total.bytes) == (32, 64 + 8)


def test_embedding_reads_the_rows_that_it_takes() -> None:
    build = Builder()
    table = build.placeholder("w", (1000, 16), HALF, Layout())
    ids = build.placeholder("i", (2, 5), torch.int64, Layout())
    cost = node_cost(build.call(aten.embedding.default, table, ids))
    assert cost.bytes == 2 * 10 * 16 * 2 + 10 * 8
    assert cost.backward_bytes == 2 * 10 * 16 * 2 + 1000 * 16 * 2


def test_roofline() -> None:
    hw = load("a100-80g")
    n = 8192
    big = node_cost(node(aten.mm.default, (n, n), (n, n)))
    forward, backward = seconds(big, hw, HALF)
    assert forward == pytest.approx(2 * n**3 / (312e12 * efficiency((n, n, n), hw)))
    assert backward == pytest.approx(2 * forward)
    light = node_cost(node(aten.mul.Tensor, (n, n), (n, n)))
    assert seconds(light, hw, HALF)[0] == pytest.approx(3 * 2 * n * n / (2.048e12 * 0.9))
    thin = node_cost(node(aten.mm.default, (1, n), (n, n)))
    assert seconds(thin, hw, HALF)[0] > 2 * n * n / 312e12 / 0.8


# Rows of SimuMax configs/system/a100_pcie.json @4dcaae5 (m, n, k, measured share of peak).
MEASURED = [
    (4096, 1536, 5120, 0.78767),
    (4096, 24576, 1536, 0.69713),
    (4096, 5120, 16384, 0.74928),
    (4096, 102400, 5120, 0.75519),
    (24640, 3072, 5120, 0.74065),
    (4096, 32768, 512, 0.61758),
]


@pytest.mark.parametrize(("m", "n", "k", "share"), MEASURED)
def test_efficiency_is_near_measurements(m: int, n: int, k: int, share: float) -> None:
    assert efficiency((m, n, k), load("a100-80g")) == pytest.approx(share, rel=0.2)


@settings(deadline=None)
@given(st.tuples(SIZES, SIZES, SIZES), st.integers(1, 9))
def test_efficiency_grows_with_size(dims: tuple[int, int, int], by: int) -> None:
    hw = load("h100")
    assert efficiency(dims, hw) < efficiency([d + by for d in dims], hw) < hw.matmul_efficiency
