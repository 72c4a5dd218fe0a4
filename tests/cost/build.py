"""Programs written by hand for the cost tests: a transformer layer as Megatron cuts it, with its layouts."""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir import ops
from autopar.ir.layout import I, Layout, P, R, Type, plain_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Block, Form, Param, Program, Spec

aten = torch.ops.aten


@dataclass
class Builder:
    """An fx graph with specs computed on meta tensors."""

    graph: fx.Graph = field(default_factory=fx.Graph)

    def call(self, target: Any, *args: Any, layout: Layout | None = None, diff: bool = True, **kwargs: Any) -> fx.Node:
        def meta(arg: Any) -> Any:
            spec = arg.meta["spec"]
            return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

        out = target(*fx.map_arg(args, meta), **fx.map_arg(kwargs, meta))
        node = self.graph.call_function(target, args, kwargs)
        several = isinstance(out, tuple | list)
        found = tuple(Spec(tuple(o.shape), o.dtype) for o in (out if several else (out,)))
        node.meta.update(spec=found if several else found[0], diff=diff)
        if layout is not None:
            node.meta["layout"] = layout
        return node

    def convert(self, x: fx.Node, axis: str, src: Type, dst: Type) -> fx.Node:
        return self.call(ops.convert, x, axis, src, dst, layout=x.meta["layout"].having(axis, dst))

    def placeholder(self, name: str, shape: tuple[int, ...], dtype: Any, layout: Layout, **meta: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta.update(spec=Spec(shape, dtype), layout=layout, diff=True, **meta)
        return node


@dataclass(frozen=True)
class Sizes:
    """A layer's sizes, all different, so that a size tells which it is."""

    b: int = 3
    s: int = 20
    h: int = 56
    a: int = 8
    t: int = 4
    d: int = 2
    dtype: torch.dtype = torch.float16
    dropout: float = 0.1


class Layer:
    """The block of one layer on axes dp (batch) and tp; with ``sequence`` the norm regions are sharded on dim 1."""

    def __init__(self, z: Sizes, sequence: bool) -> None:
        self.z, self.sequence, self.build = z, sequence, Builder()
        self.params: dict[str, Param] = {}
        self.rest: Type = self.shard(1, z.s) if sequence else I

    def shard(self, dim: int, length: int) -> Type:
        found = plain_shard(dim, length, self.z.t)
        assert found
        return found

    def on(self, tp: Type) -> Layout:
        batch = plain_shard(0, self.z.b * self.z.d, self.z.d)
        assert batch
        return Layout((("dp", batch), ("tp", tp)))

    def param(self, name: str, *shape: int, tp: Type) -> fx.Node:
        layout = Layout((("dp", R), ("tp", tp)))
        self.params[name] = Param(name, Spec(shape, self.z.dtype), "parameter", layout=layout)
        return self.build.placeholder(name, shape, self.z.dtype, layout, param=name)

    def graph(self) -> fx.Graph:
        z = self.z
        x = self.build.placeholder("x", (z.b * z.d, z.s, z.h), z.dtype, self.on(self.rest))
        whole = R if self.sequence else I
        norms = [self.param(f"norm{i}", z.h, tp=whole) for i in (1, 2)]
        inward = [self.param(n, z.h, z.h, tp=self.shard(0, z.h)) for n in "qkv"]
        o = self.param("o", z.h, z.h, tp=self.shard(1, z.h))
        up, down = (
            self.param("up", 4 * z.h, z.h, tp=self.shard(0, 4 * z.h)),
            self.param("down", z.h, 4 * z.h, tp=self.shard(1, 4 * z.h)),
        )
        x = self.residual(x, norms[0], lambda y: self.attention(y, inward, o))
        x = self.residual(x, norms[1], lambda y: self.mlp(y, up, down))
        self.build.graph.output((x,))
        return self.build.graph

    def residual(self, x: fx.Node, norm: fx.Node, inside: Any) -> fx.Node:
        put, z = self.build.call, self.z
        y = put(aten.layer_norm.default, x, [z.h], norm, norm, 1e-5, layout=self.on(self.rest))
        y = inside(self.build.convert(y, "tp", self.rest, R))
        y = self.build.convert(y, "tp", P, self.rest)
        y = put(ops.dropout, y, z.dropout, 0, layout=self.on(self.rest)) if z.dropout else y
        return put(aten.add.Tensor, x, y, layout=self.on(self.rest))

    def attention(self, y: fx.Node, weights: list[fx.Node], o: fx.Node) -> fx.Node:
        put, z = self.build.call, self.z
        heads = []
        for w in weights:
            u = put(aten.linear.default, y, w, layout=self.on(self.shard(2, z.h)))
            u = put(aten.reshape.default, u, [z.b * z.d, z.s, z.a, z.h // z.a], layout=self.on(self.shard(2, z.a)))
            heads.append(put(aten.transpose.int, u, 1, 2, layout=self.on(self.shard(1, z.a))))
        u = put(ops.attention, *heads, None, z.dropout, layout=self.on(self.shard(1, z.a)))
        u = put(aten.transpose.int, u, 1, 2, layout=self.on(self.shard(2, z.a)))
        u = put(aten.reshape.default, u, [z.b * z.d, z.s, z.h], layout=self.on(self.shard(2, z.h)))
        return put(aten.linear.default, u, o, layout=self.on(P))

    def mlp(self, y: fx.Node, up: fx.Node, down: fx.Node) -> fx.Node:
        put, wide = self.build.call, self.on(self.shard(2, 4 * self.z.h))
        u = put(aten.gelu.default, put(aten.linear.default, y, up, layout=wide), layout=wide)
        return put(aten.linear.default, u, down, layout=self.on(P))


def layers(z: Sizes, sequence: bool = False, count: int = 1) -> Program:
    """``count`` layers one after the other on dp=``z.d``, tp=``z.t``."""
    layer = Layer(z, sequence)
    block = Block("layers.*", layer.graph())
    outer = Builder()
    x = outer.placeholder("x", (z.b * z.d, z.s, z.h), z.dtype, layer.on(layer.rest), input=0)
    params: dict[str, Param] = {}
    for i in range(count):
        for name, p in layer.params.items():
            full = f"layers.{i}.{name}"
            params[full] = Param(full, p.spec, "parameter", layout=p.layout)
    for i in range(count):
        call = outer.graph.create_node("call_module", "layers.*", (x,))
        call.meta.update(path=f"layers.{i}", spec=(x.meta["spec"],), layout=(x.meta["layout"],))
        spec, layout = x.meta["spec"], x.meta["layout"]
        x = outer.graph.call_function(operator.getitem, (call, 0))
        x.meta.update(spec=spec, layout=layout, diff=True)
    outer.graph.output((x,))
    return Program(
        Mesh.of({"dp": z.d, "tp": z.t}), outer.graph, {"layers.*": block}, params, (), (), form=Form.RESHARDED
    )
