"""Each row of the conversion table: bytes by definition, duality, ends, and the price of links."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost import load
from autopar.cost.communication import (
    Link,
    collective_bytes,
    collective_seconds,
    collectives,
    inner_link,
    link_between,
    link_of,
    link_with,
    seconds,
    shard_link,
    wire_bytes,
)
from autopar.cost.links import Links
from autopar.cost.symbols import axis_size, evaluate
from autopar.ir.layout import I, P, R, Shard, Type, piece, plain_shard
from autopar.ir.mesh import Mesh

WAYS = st.integers(2, 12)


def kinds(n: int) -> dict[str, Type]:
    s, u = plain_shard(0, 12 * n, n), plain_shard(1, 12 * n, n)
    assert s and u
    return {"I": I, "R": R, "P": P, "S": s, "T": u}


TABLE = [
    ("S", "R", "all_gather", "reduce_scatter"),
    ("S", "I", "all_gather", None),
    ("S", "P", None, None),
    ("I", "R", None, "all_reduce"),
    ("I", "S", None, "all_gather"),
    ("I", "P", None, None),
    ("R", "S", None, None),
    ("R", "I", None, None),
    ("R", "P", None, None),
    ("P", "I", "all_reduce", None),
    ("P", "R", "all_reduce", "all_reduce"),
    ("P", "S", "reduce_scatter", "all_gather"),
    ("S", "T", "all_to_all", "all_to_all"),
]


@pytest.mark.parametrize(("src", "dst", "forward", "backward"), TABLE)
def test_table(src: str, dst: str, forward: str | None, backward: str | None) -> None:
    of = kinds(4)
    assert collectives(of[src], of[dst]) == (forward, backward)


def sends(collective: str, n: int) -> Iterator[tuple[int, int]]:
    """(sender, chunks of 1/n² of the value) of every message: rings, and direct messages for the all-to-all."""
    if collective == "all_to_all":
        yield from ((i, 1) for i, j in product(range(n), range(n)) if i != j)
        return
    for _, rank in product(range((2 if collective == "all_reduce" else 1) * (n - 1)), range(n)):
        yield rank, n


@settings(deadline=None)
@given(WAYS, st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]), st.integers(1, 100))
def test_bytes_are_those_of_the_messages(n: int, collective: str, unit: int) -> None:
    sent = [0] * n
    for rank, chunks in sends(collective, n):
        sent[rank] += chunks * unit
    assert [collective_bytes(collective, unit * n * n, n)] * n == sent


@settings(deadline=None)
@given(WAYS, st.sampled_from("IRPST"), st.sampled_from("IRPST"))
def test_backward_is_the_conversion_of_the_gradient(n: int, src: str, dst: str) -> None:
    """The gradient of an R is a P and the other way round; a backward converts the one gradient type to the other."""
    of, dual = kinds(n), {"I": "I", "R": "P", "P": "R", "S": "S", "T": "T"}
    assert collectives(of[src], of[dst])[1] == collectives(of[dual[dst]], of[dual[src]])[0]


@settings(deadline=None)
@given(WAYS, st.sampled_from("IRPST"), st.sampled_from("IRPST"), st.integers(1, 10**9))
def test_symbols_and_numbers_agree(n: int, src: str, dst: str, whole: int) -> None:
    of, link, symbol = kinds(n), inner_link(load("h100")), axis_size("tp")
    exact = (*wire_bytes(of[src], of[dst], whole, n), *seconds(of[src], of[dst], whole, n, link))
    form = (*wire_bytes(of[src], of[dst], whole, symbol), *seconds(of[src], of[dst], whole, symbol, link))
    assert [evaluate(f, {"tp": n}) for f in form] == pytest.approx([float(e) for e in exact])


@pytest.mark.parametrize(("src", "dst"), [row[:2] for row in TABLE])
def test_one_rank_costs_nothing(src: str, dst: str) -> None:
    of, n, link = kinds(2), axis_size("tp"), inner_link(load("a100-80g"))
    assert wire_bytes(of[src], of[dst], 10**6, 1) == (0, 0)
    assert seconds(of[src], of[dst], 10**6, 1, link) == (0, 0)
    form = (*wire_bytes(of[src], of[dst], 10**6, n), *seconds(of[src], of[dst], 10**6, n, link))
    assert [evaluate(f, {"tp": 1}) for f in form] == [0.0] * 4


def test_all_reduce_is_gather_and_scatter() -> None:
    b, n = sympy.symbols("b n", positive=True)
    parts = collective_bytes("reduce_scatter", b, n) + collective_bytes("all_gather", b, n)
    assert sympy.simplify(collective_bytes("all_reduce", b, n) - parts) == 0
    assert sympy.simplify(collective_bytes("all_reduce", b, n) - 2 * b * (n - 1) / n) == 0


def test_another_digit_of_a_dim_is_gathered_and_cut() -> None:
    major, minor = Shard(0, (piece(12, 4, 3, 2),)), Shard(0, (piece(12, 3, 1, 3),))
    assert collectives(major, minor) == ("all_gather", "all_gather")
    assert wire_bytes(major, minor, 1440, 2) == (720, 720)


def test_seconds_of_a_ring() -> None:
    link = Link(
        dict.fromkeys(("all_reduce", "all_gather"), 1e9), latency=1e-6, network_latency=1e-5, base=1e-4, nodes=2
    )
    assert collective_seconds("all_gather", 8e9, 8, link) == pytest.approx(6e-6 + 1e-5 + 1e-4 + 7.0)
    assert collective_seconds("all_reduce", 8e9, 8, link) == pytest.approx(12e-6 + 2e-5 + 1e-4 + 14.0)


def test_minor_axes_stay_inside_a_node() -> None:
    hw, mesh = load("h100"), Mesh.parse("dp=4,tp=8")
    tp, dp = link_of(hw, mesh, "tp"), link_of(hw, mesh, "dp")
    assert (tp.nodes, dp.nodes) == (1, 4)
    assert tp.rates["all_gather"] == hw.inner.rate("all_gather")
    assert dp.rates["all_gather"] == hw.outer.rate("all_gather")
    assert dp.rates["all_gather"] < tp.rates["all_gather"]
    assert link_of(hw, mesh, "dp", "tp").nodes == 4


def test_ring_over_nodes_uses_every_adapter() -> None:
    hw = load("a100-80g")
    assert link_between(hw, 16).rates["all_gather"] == pytest.approx(min(8 * 22.5e9, hw.inner.rate("all_gather")))
    assert link_between(hw, 16, stride=4).rates["all_gather"] == pytest.approx(2 * 22.5e9)
    assert link_between(hw, 4, stride=8).rates["all_gather"] == pytest.approx(22.5e9)


def test_split_axis_has_the_link_of_its_ranks() -> None:
    hw, mesh = load("h100"), Mesh.parse("dp=2,tp=8")
    halves = mesh.split("tp", 2)
    assert link_of(hw, halves, "tp") == link_of(hw, mesh, "tp")
    assert link_of(hw, halves, "tp0") == link_between(hw, 2, stride=4)
    assert link_of(hw, halves, "dp") == link_of(hw, mesh, "dp")


def fewest(node: int, mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Ranks of a group on the node that has fewest of it, by counting them."""
    groups: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for rank in range(mesh.world):
        where = mesh.coordinates(rank)
        groups[tuple(n for a, n in where.items() if a not in axes)][rank // node] += 1
    return min(min(nodes.values()) for nodes in groups.values())


@pytest.mark.parametrize("node", [1, 4, 6, 8])
def test_ranks_of_a_group_on_a_node_are_counted(node: int) -> None:
    """Also of several axes with another between, and of groups across the border of a node: there never too many."""
    hardware, exact = replace(load("h100"), node=node), 0
    for sizes, axes in product(
        product((1, 2, 3, 4), repeat=3), (("dp",), ("tp",), ("cp",), ("dp", "tp"), ("dp", "cp"))
    ):
        mesh = Mesh.of(dict(zip(("dp", "tp", "cp"), sizes)))
        if mesh.world > node and mesh.world % node:
            continue
        columns = {a: np.array([float(mesh.size(a))]) for a in ("pp", "dp", "ep", "tp", "cp")}
        found, true = int(Links.placed(hardware, columns, tuple(columns)).inside(axes)[0]), fewest(node, mesh, axes)
        ways = int(np.prod([mesh.size(a) for a in axes]))
        assert link_of(hardware, mesh, *axes) == link_with(hardware, ways, found)
        even = all(node % n == 0 or n % node == 0 for n in (sizes[2], sizes[1] * sizes[2])) or mesh.world <= node
        assert found == true if even else found <= true, (mesh, axes, true)
        exact += even
    assert exact > 50


def test_another_axis_between_two_that_sum_gradients_leaves_fewer_of_their_ranks_on_a_node() -> None:
    hardware = load("h100")
    apart, beside = Mesh.parse("dp=64,tp=2,cp=2"), Mesh.parse("dp=64,cp=2,tp=2")
    assert link_of(hardware, apart, "dp", "cp") == link_of(hardware, beside, "dp", "cp") == link_with(hardware, 128, 4)
    columns = {a: np.array([float(apart.size(a))]) for a in ("pp", "dp", "ep", "tp", "cp")}
    assert Links.placed(hardware, columns, tuple(columns)).inside(("dp", "cp")) == 4


def test_shards_inside_a_node_do_not_pay_for_the_network() -> None:
    hardware, mesh = load("h100"), Mesh.parse("dp=32,tp=2")
    assert shard_link(hardware, mesh, ("dp",), 4, False) == link_between(hardware, 4)
    assert shard_link(hardware, mesh, ("dp",), 4, True) == link_between(hardware, 8, 8)
