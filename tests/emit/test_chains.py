"""Equal layers that become one node of the outer function, and those that must not."""

import operator
from typing import Any

import pytest
from torch import fx

from autopar.emit.chains import chains_of, looped


class Outer:
    """An outer graph of calls of one block, written a line at a time."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.passed: dict[fx.Node, list[Any]] = {}
        self.x, self.mask = self.graph.placeholder("x"), self.graph.placeholder("mask")

    def call(self, *values: Any, target: str = "layers.*") -> fx.Node:
        call = self.graph.create_node("call_module", target, tuple(v for v in values if isinstance(v, fx.Node)))
        self.passed[call] = list(values)
        return call

    def item(self, call: fx.Node, index: int = 0) -> fx.Node:
        return self.graph.call_function(operator.getitem, (call, index))

    def chains(self, *results: fx.Node) -> list[tuple[list[fx.Node], tuple[tuple[int, int], ...]]]:
        self.graph.output(results)
        return [(c.calls, c.carried) for c in chains_of(self.graph, self.passed)]


def test_layers_that_feed_each_other() -> None:
    o, calls = Outer(), []
    h = o.x
    for _ in range(4):
        calls.append(o.call(h, o.mask))
        h = o.item(calls[-1])
    assert o.chains(h) == [(calls, ((0, 0),))]


def test_two_values_that_change_places() -> None:
    o = Outer()
    a = o.call(o.x, o.mask)
    b = o.call(o.item(a, 1), o.item(a, 0))
    c = o.call(o.item(b, 1), o.item(b, 0))
    assert o.chains(o.item(c)) == [([a, b, c], ((0, 1), (1, 0)))]
    run = looped([lambda p, q: (p, q + 1)] * 3, ((0, 1), (1, 0)))
    assert run(0, 10) == (1, 12)


@pytest.mark.parametrize(
    "why", ("read later", "another value", "an op between", "another block", "not fed", "own weight")
)
def test_layers_that_stay_apart(why: str) -> None:
    o = Outer()
    a = o.call(o.x, o.mask, *(("w0",) if why == "own weight" else ()))
    h = o.item(a)
    if why == "an op between":
        o.graph.call_function(operator.neg, (o.mask,))
    given = {"another value": (h, o.x), "not fed": (o.x, o.mask), "own weight": (h, o.mask, "w1")}.get(why, (h, o.mask))
    b = o.call(*given, target="others" if why == "another block" else "layers.*")
    assert o.chains(o.item(b), *((h,) if why in ("read later", "not fed") else ())) == []


def test_a_chain_ends_where_another_begins() -> None:
    o = Outer()
    a = o.call(o.x, o.mask)
    b = o.call(o.item(a), o.mask)
    h = o.item(b)
    c = o.call(h, h)
    d = o.call(o.item(c), h)
    assert o.chains(o.item(d)) == [([a, b], ((0, 0),)), ([c, d], ((0, 0),))]
