"""Equal layers one after the other, which the outer function runs in a loop: its text does not grow with depth."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass
class Chain:
    """Calls of one block, each fed by the one before and otherwise with the same values.

    Args:
        calls: at least two, in order.
        carried: (place among the values that a call takes, which result of the call before comes there).
    """

    calls: list[fx.Node]
    carried: tuple[tuple[int, int], ...]


def chains_of(graph: fx.Graph, passed: Mapping[fx.Node, Sequence[Any]]) -> Iterator[Chain]:
    """The chains of an outer graph. ``passed``: the values that each call takes."""
    calls: list[fx.Node] = []
    carried: tuple[tuple[int, int], ...] | None = None
    for node in graph.nodes:
        if node.op == "placeholder" or (calls and _is_item(node, calls[-1])):
            continue
        found = _carried(calls[-1], node, passed) if calls and node in passed else None
        if found and carried in (None, found):
            calls.append(node)
            carried = found
            continue
        if carried:
            yield Chain(calls, carried)
        calls, carried = [node] if node in passed else [], None


def _is_item(node: fx.Node, call: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0] is call


def _carried(
    last: fx.Node, call: fx.Node, passed: Mapping[fx.Node, Sequence[Any]]
) -> tuple[tuple[int, int], ...] | None:
    """What ``call`` takes of ``last``, if it follows in a chain; None if not."""
    before, now = passed[last], passed[call]
    if call.target != last.target or len(before) != len(now):
        return None
    if not all(_is_item(u, last) and u.users.keys() == {call} for u in last.users):
        return None
    own = [isinstance(v, fx.Node) and _is_item(v, last) for v in now]
    if any(a != b for a, b, mine in zip(before, now, own) if not mine):
        return None
    return tuple((at, v.args[1]) for at, (v, mine) in enumerate(zip(now, own)) if mine)


def looped(runners: Sequence[Callable[..., Any]], carried: tuple[tuple[int, int], ...]) -> Callable[..., Any]:
    """The chain as a function of what its first call takes; returns what its last call does."""
    *first, last = runners

    def run(*values: Any) -> Any:
        given = list(values)
        for runner in first:
            out = runner(*given)
            for at, index in carried:
                given[at] = out[index]
            del out  # it may hold what the next layer need not
        return last(*given)

    return run
