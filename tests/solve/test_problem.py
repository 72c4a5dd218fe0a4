"""The integer program against trying every choice under the same prices."""

import random
from collections.abc import Iterator
from itertools import product
from math import prod

import pytest
from torch import fx

from autopar.errors import AutoparError
from autopar.ir.layout import Type
from autopar.rules.relation import Assignment
from autopar.solve.flow import Flow, flow_of
from autopar.solve.problem import Choices, solve
from tests.solve.random_programs import choices, flat, layered


def total(
    flow: Flow, given: Choices, types: dict[int, Type], picks: dict[fx.Node, Assignment], outs: list[Type]
) -> float:
    """Price of one choice, by the meaning of the terms rather than by the equations."""
    types = dict(types)
    for node, a in picks.items():
        types |= {v: t for v, t in zip(flow.outputs(node), a.outputs) if v is not None}
    price = sum(w * given.op_price(n, picks[n]) for n, w in flow.ops)
    price += sum(flow.values[v].weight * given.source_price(v, types[v]) for v in given.types)
    for group in flow.groups:
        wanted = [outs[r.port] if r.kind == "output" else picks[r.node].inputs[r.port] for r in group.reads]
        wanted += [types[a] for a in group.arguments]
        have = types[group.value]
        price += sum(group.weight * given.convert_price(group.value, have, u) for u in {*wanted} if u != have)
    return price


def every(flow: Flow, given: Choices) -> Iterator[float]:
    nodes, values = list(given.strategies), list(given.types)
    for picks in product(*given.strategies.values()):
        for types in product(*given.types.values()):
            for outs in product(*given.outputs):
                yield total(flow, given, dict(zip(values, types)), dict(zip(nodes, picks)), list(outs))


@pytest.mark.parametrize("seed", range(24))
def test_the_answer_is_the_cheapest_of_all(seed: int) -> None:
    rng = random.Random(seed)
    flow = flow_of((layered if seed % 2 else flat)(rng))
    given = choices(flow, rng)
    prices = list(every(flow, given))
    assert len(prices) == prod(map(len, (*given.strategies.values(), *given.types.values(), *given.outputs)))
    found = solve(flow, given)
    sources = {v: found.types[v] for v in given.types}
    mine = total(flow, given, sources, found.assignments, found.outputs)
    assert mine == pytest.approx(min(prices), abs=1e-3)
    assert found.price == pytest.approx(mine, abs=1e-3)
    for node, a in found.assignments.items():
        assert a in given.strategies[node]
        assert [found.types[v] for v in flow.outputs(node) if v is not None] == list(a.outputs)


def test_the_programs_share_conversions_and_cross_blocks() -> None:
    """The cases above would not see a conversion paid twice without these."""
    flows = [flow_of((layered if seed % 2 else flat)(random.Random(seed))) for seed in range(24)]
    assert sum(len(g.reads) > 1 for f in flows for g in f.groups) > 10
    assert sum(bool(g.arguments) for f in flows for g in f.groups) > 10
    assert any(g.weight > 1 for f in flows for g in f.groups)


@pytest.mark.parametrize("kind", (flat, layered))
def test_what_cannot_be_is_an_error(kind) -> None:
    rng = random.Random(3)
    flow = flow_of(kind(rng))
    given = choices(flow, rng)
    given.types[next(iter(given.types))] = []
    with pytest.raises(AutoparError) as caught:
        solve(flow, given)
    assert caught.value.slug == "no-plan"


def test_ties_are_broken_by_order() -> None:
    """Every price zero: the first strategy and the first type of each."""
    rng = random.Random(5)
    flow = flow_of(flat(rng))
    given = choices(flow, rng)
    given.op_price = lambda node, a: 0.0
    given.source_price = lambda v, t: 0.0
    given.convert_price = lambda v, t, u: 0.0
    found = solve(flow, given)
    assert [found.assignments[n] for n in given.strategies] == [options[0] for options in given.strategies.values()]
    assert [found.types[v] for v in given.types] == [types[0] for types in given.types.values()]
