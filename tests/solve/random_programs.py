"""Small random programs, with and without a block of equal layers, and random prices."""

import operator
import random
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import I, P, R, Type, plain_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Block, Input, Output, Param, Program, Spec
from autopar.rules.strategies import strategies
from autopar.rules.table import aten
from autopar.solve.candidates import relations_of, spread
from autopar.solve.flow import Flow
from autopar.solve.problem import Choices
from autopar.solve.sources import sources

N, WAYS = 4, 2
SPEC = Spec((N, N), torch.float32)


def _ops(rng: random.Random, graph: fx.Graph, values: list[fx.Node], many: int) -> None:
    for _ in range(many):
        target = rng.choice([aten.relu.default, aten.add.Tensor, aten.mm.default, aten.mm.default, aten.mul.Tensor])
        args = [rng.choice(values[-3:]) for _ in range(1 if target is aten.relu.default else 2)]
        values.append(_typed(graph.call_function(target, tuple(args))))


def _typed(node: fx.Node, **meta: Any) -> fx.Node:
    node.meta |= {"spec": SPEC, "diff": True, **meta}
    return node


def flat(rng: random.Random, ops: int = 4) -> Program:
    """One input, two parameters, some ops, one or two outputs."""
    graph = fx.Graph()
    values = [_typed(graph.placeholder("x"), input=0)]
    values += [_typed(graph.placeholder(n), param=n) for n in ("a", "b")]
    _ops(rng, graph, values, ops)
    outs = [values[-1]] + ([rng.choice(values[3:])] if rng.random() < 0.5 else [])
    graph.output(tuple(outs))
    return _program(graph, {}, ("a", "b"), len(outs))


def layered(rng: random.Random) -> Program:
    """Two calls of a block of two or three ops, one after the other."""
    inner = fx.Graph()
    h = _typed(inner.placeholder("h"))
    w = _typed(inner.placeholder("w"), param="w")
    values = [h, w]
    _ops(rng, inner, values, rng.choice((2, 3)))
    inner.output((values[-1],))
    graph = fx.Graph()
    x = _typed(graph.placeholder("x"), input=0)
    for i in range(2):
        call = graph.call_module("layers.*", (x,))
        call.meta = {"spec": (SPEC,), "diff": True, "path": f"layers.{i}"}
        x = _typed(graph.call_function(operator.getitem, (call, 0)))
    graph.output((_typed(graph.call_function(aten.relu.default, (x,))),))
    return _program(graph, {"layers.*": Block("layers.*", inner)}, ("layers.0.w", "layers.1.w"), 1)


def _program(graph: fx.Graph, blocks: dict[str, Block], names: tuple[str, ...], outs: int) -> Program:
    params = {n: Param(n, SPEC, "parameter") for n in names}
    outputs = tuple(Output("user", f"y{i}") for i in range(outs))
    return Program(Mesh.of({"tp": WAYS}), graph, blocks, params, (Input("x", SPEC, None),), outputs)


def choices(flow: Flow, rng: random.Random, most: int = 4) -> Choices:
    """A random part of the strategies, and a random price for everything."""
    relations = relations_of(flow)
    shards = [plain_shard(d, N, WAYS) for d in (0, 1)]
    found = spread(flow, relations, [(v, s) for v in sources(flow) for s in shards if s])
    options = {}
    for node, _ in flow.ops:
        every = strategies(node, found.ports(flow, node), relations[node])
        options[node] = rng.sample(every, min(most, len(every)))
    kinds: list[Type] = [I, R, P, *(s for s in shards if s)]
    types = {v: rng.sample(kinds, 2 if flow.values[v].role != "input" else 1) for v in sources(flow)}
    seed = rng.random()
    names = {node: i for i, (node, _) in enumerate(flow.ops)}

    def price(*key: object) -> float:
        return zlib.crc32(repr((seed, *key)).encode()) % 1000 / 10

    def of_op(node: fx.Node, a: Any) -> float:
        return price("op", names[node], str(a))

    outputs = [rng.sample(kinds, 2) for _ in flow.program.outputs]
    convert: Callable[[int, Type, Type], float] = lambda v, t, u: 1 + price("convert", v, str(t), str(u))  # noqa: E731
    return Choices(types, options, outputs, of_op, lambda v, t: price("source", v, str(t)), convert)
