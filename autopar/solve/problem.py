"""The integer program of one mesh axis: a strategy for each op, a conversion for each (value, type), solved by HiGHS.

Variables (all in [0, 1]):
    s[n, k]     op n uses strategy k                                (binary)
    x[v, t]     parameter, input or block argument v has type t     (binary)
    z[r, t, u]  reader r takes its value, of type t, as type u      (continuous; integral wherever s and x are)
    y[g, t, u]  the group's value is converted from t to u          (continuous; shared by the readers of group g)
Equations: ``_one`` (each op one strategy, each source one type), ``_ends`` (flows of a reader start at the value's type
and end at the type that the reader wants), ``_shared`` (y >= z).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import fx

from autopar.errors import AutoparError
from autopar.ir.layout import Type
from autopar.rules.relation import Assignment
from autopar.solve.flow import Flow, Group, Read

Expression = dict[int, float]
NODE_LIMIT = 20_000
TIE = 1e-5


@dataclass
class Choices:
    """What may be chosen on one axis, and its price in microseconds.

    Args:
        types: types that each source (parameter, input, block argument) may have, by value.
        strategies: assignments that each op may use.
        outputs: types that each entry of the outer output may have.
        op_price, source_price: of a strategy of an op, of a type of a source, for one run.
        convert_price: of taking a value from one type to another, forward and backward, for one run.
    """

    types: dict[int, list[Type]]
    strategies: dict[fx.Node, list[Assignment]]
    outputs: list[list[Type]]
    op_price: Callable[[fx.Node, Assignment], float]
    source_price: Callable[[int, Type], float]
    convert_price: Callable[[int, Type, Type], float]


@dataclass
class Solution:
    """The chosen type of each value and assignment of each op."""

    types: dict[int, Type]
    assignments: dict[fx.Node, Assignment]
    outputs: list[Type]
    price: float


@dataclass
class _Build:
    cost: list[float] = field(default_factory=list)
    binary: list[int] = field(default_factory=list)
    rows: list[tuple[Expression, float, float]] = field(default_factory=list)

    def var(self, cost: float, binary: bool) -> int:
        self.cost.append(cost)
        self.binary.append(int(binary))
        return len(self.cost) - 1

    def equal(self, left: Expression, right: float) -> None:
        self.rows.append((left, right, right))


def solve(flow: Flow, choices: Choices) -> Solution:
    """The cheapest choice. Raises AutoparError ``no-plan`` where HiGHS finds none within its node limit."""
    build = _Build()
    s = _one_strategy(build, flow, choices)
    x = _one_type(build, flow, choices)
    value = _types_of_values(flow, choices, s, x)
    out = [{t: build.var(TIE * i, True) for i, t in enumerate(types)} for types in choices.outputs]
    for entry in out:
        build.equal(dict.fromkeys(entry.values(), 1.0), 1.0)
    for group in flow.groups:
        _readers(build, flow, choices, group, value, s, x, out)
    chosen, price = _run(build)
    return Solution(
        {v: _pick(types, chosen) for v, types in value.items()},
        {n: choices.strategies[n][_pick({k: {i: 1.0} for k, i in enumerate(ids)}, chosen)] for n, ids in s.items()},
        [_pick({t: {i: 1.0} for t, i in entry.items()}, chosen) for entry in out],
        price,
    )


def _one_strategy(build: _Build, flow: Flow, choices: Choices) -> dict[fx.Node, list[int]]:
    s = {}
    for at, (node, weight) in enumerate(flow.ops):
        options = choices.strategies[node]
        s[node] = [
            build.var(weight * choices.op_price(node, a) + TIE * (k + 1) * (1 + at % 7), True)
            for k, a in enumerate(options)
        ]
        build.equal(dict.fromkeys(s[node], 1.0), 1.0)
    return s


def _one_type(build: _Build, flow: Flow, choices: Choices) -> dict[int, dict[Type, int]]:
    x = {}
    for v, types in choices.types.items():
        weight = flow.values[v].weight
        x[v] = {t: build.var(weight * choices.source_price(v, t) + TIE * k, True) for k, t in enumerate(types)}
        build.equal(dict.fromkeys(x[v].values(), 1.0), 1.0)
    return x


def _types_of_values(
    flow: Flow, choices: Choices, s: dict[fx.Node, list[int]], x: dict[int, dict[Type, int]]
) -> dict[int, dict[Type, Expression]]:
    value: dict[int, dict[Type, Expression]] = {v: {t: {i: 1.0} for t, i in types.items()} for v, types in x.items()}
    for node, _ in flow.ops:
        for port, v in enumerate(flow.outputs(node)):
            if v is not None:
                mine: dict[Type, Expression] = defaultdict(dict)
                for a, i in zip(choices.strategies[node], s[node]):
                    mine[a.outputs[port]][i] = 1.0
                value[v] = dict(mine)
    return value


def _readers(
    build: _Build,
    flow: Flow,
    choices: Choices,
    group: Group,
    value: dict[int, dict[Type, Expression]],
    s: dict[fx.Node, list[int]],
    x: dict[int, dict[Type, int]],
    out: list[dict[Type, int]],
) -> None:
    wants = [_wanted(choices, read, s, out) for read in group.reads]
    wants += [{t: {i: 1.0} for t, i in x[a].items()} for a in group.arguments]
    shared: dict[tuple[Type, Type], int] = {}
    for want in wants:
        ends: dict[Type, Expression] = defaultdict(dict)
        for t, made in value[group.value].items():
            start: Expression = {i: -c for i, c in made.items()}
            for u in want:
                price = group.weight * choices.convert_price(group.value, t, u) if t != u else 0.0
                z = build.var(price if len(wants) == 1 else 0.0, False)
                start[z] = 1.0
                ends[u][z] = 1.0
                if t != u and len(wants) > 1:
                    if (t, u) not in shared:
                        shared[t, u] = build.var(price, False)
                    y = shared[t, u]
                    build.rows.append(({y: 1.0, z: -1.0}, 0.0, np.inf))
            build.equal(start, 0.0)
        for u, made in want.items():
            build.equal({**ends[u], **{i: -c for i, c in made.items()}}, 0.0)


def _wanted(
    choices: Choices, read: Read, s: dict[fx.Node, list[int]], out: list[dict[Type, int]]
) -> dict[Type, Expression]:
    if read.kind == "output":
        return {t: {i: 1.0} for t, i in out[read.port].items()}
    want: dict[Type, Expression] = defaultdict(dict)
    for a, i in zip(choices.strategies[read.node], s[read.node]):
        want[a.inputs[read.port]][i] = 1.0
    return dict(want)


def _run(build: _Build) -> tuple[Any, float]:
    entries = [(r, i, c) for r, (expr, _, _) in enumerate(build.rows) for i, c in expr.items()]
    r, i, c = (np.array(part) for part in zip(*entries))
    matrix = csr_array((c, (r, i)), shape=(len(build.rows), len(build.cost)))
    low, high = (np.array([row[k] for row in build.rows]) for k in (1, 2))
    result = milp(
        np.array(build.cost),
        integrality=np.array(build.binary),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, low, high),
        options={"node_limit": NODE_LIMIT, "mip_rel_gap": 1e-6},
    )
    if result.x is None:
        raise AutoparError("no-plan", f"the integer program has no solution: {result.message}", "report this model")
    return result.x, float(result.fun)


def _pick(options: dict[Any, Expression], chosen: Any) -> Any:
    """The option whose variables add up to one."""
    return max(options, key=lambda t: sum(c * chosen[i] for i, c in options[t].items()))


def conversions(flow: Flow, solution: Solution) -> Iterator[tuple[int, Type, Type]]:
    """(value, type, wanted type) of every reader that wants another type."""
    for group in flow.groups:
        wanted = [solution.types[a] for a in group.arguments]
        for read in group.reads:
            if read.kind == "output":
                wanted.append(solution.outputs[read.port])
            else:
                wanted.append(solution.assignments[read.node].inputs[read.port])
        for want in wanted:
            if want != solution.types[group.value]:
                yield group.value, solution.types[group.value], want
