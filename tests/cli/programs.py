"""Small programs written by hand, for the printer's tests."""

import operator

import torch
from torch import fx

from autopar.ir import ops
from autopar.ir.layout import I, Layout, P, R, Shard, plain_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Block, Form, Input, Output, Param, Program, Spec

aten = torch.ops.aten
MESH = Mesh.of({"dp": 2, "tp": 2})
B, S, H = 4, 8, 16
ROWS = plain_shard(0, B, 2)
COLUMN, TOKENS = plain_shard(0, 2 * H, 2), plain_shard(1, S, 2)


def value(node: fx.Node, shape: tuple[int, ...], tp: object, dp: object = ROWS, module: str = "") -> fx.Node:
    node.meta |= {"spec": Spec(shape, torch.float32), "layout": Layout.of({"dp": dp, "tp": tp}), "module": module}
    return node


def _weight(graph: fx.Graph, name: str, shape: tuple[int, ...], tp: object) -> fx.Node:
    node = value(graph.placeholder(name.replace(".", "_")), shape, tp, R)
    node.meta["param"] = name
    return node


def layer() -> fx.Graph:
    """Sequence parallel up and down projections with a residual."""
    graph, where = fx.Graph(), "layers.0."
    x = value(graph.placeholder("x"), (B, S, H), TOKENS)
    up = _weight(graph, "up.weight", (2 * H, H), COLUMN)
    down = _weight(graph, "down.weight", (H, 2 * H), plain_shard(1, 2 * H, 2))
    whole = value(graph.call_function(ops.convert, (x, "tp", TOKENS, R)), (B, S, H), R, module=where + "up")
    wide = graph.call_function(aten.linear.default, (whole, up))
    value(wide, (B, S, 2 * H), plain_shard(2, 2 * H, 2), module=where + "up")
    a, b = _halves(graph, wide, "layers.0")
    act = value(graph.call_function(aten.mul.Tensor, (a, b)), (B, S, H), plain_shard(2, H, 2), module="layers.0")
    join = value(graph.call_function(aten.cat.default, ([act, act], 2)), (B, S, 2 * H), _pair(H), module="layers.0")
    out = value(graph.call_function(aten.linear.default, (join, down)), (B, S, H), P, module=where + "down")
    out = value(graph.call_function(ops.convert, (out, "tp", P, TOKENS)), (B, S, H), TOKENS, module=where + "down")
    out = value(graph.call_function(aten.add.Tensor, (x, out)), (B, S, H), TOKENS, module="layers.0")
    graph.output((out,))
    return graph


def _pair(width: int) -> Shard:
    (one,) = plain_shard(2, width, 2).pieces
    return Shard(2, (one, one))


def _halves(graph: fx.Graph, wide: fx.Node, module: str) -> list[fx.Node]:
    both = graph.call_function(aten.split_with_sizes.default, (wide, [H, H], 2))
    half = Spec((B, S, H), torch.float32)
    layout = Layout.of({"dp": ROWS, "tp": plain_shard(2, H, 2)})
    both.meta = {"spec": (half, half), "layout": (layout, layout), "module": module}
    items = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    return [value(i, half.shape, plain_shard(2, H, 2), module=module) for i in items]


def model(layers: int = 3) -> Program:
    """``layers`` calls of one block, a causal attention, and a sum as the loss. Form RESHARDED."""
    graph = fx.Graph()
    x = value(graph.placeholder("x"), (B, S, H), I)
    x.meta["input"] = 0
    params = {}
    for i in range(layers):
        for name, shape, tp in (
            ("up.weight", (2 * H, H), COLUMN),
            ("down.weight", (H, 2 * H), plain_shard(1, 2 * H, 2)),
        ):
            full = f"layers.{i}.{name}"
            params[full] = Param(full, Spec(shape, torch.float32), "parameter", layout=Layout.of({"dp": R, "tp": tp}))
    h = value(graph.call_function(ops.convert, (x, "tp", I, TOKENS)), (B, S, H), TOKENS)
    for i in range(layers):
        call = graph.call_module("layers.*", (h,))
        call.meta = {"path": f"layers.{i}", "spec": (Spec((B, S, H), torch.float32),), "layout": (h.meta["layout"],)}
        h = value(graph.call_function(operator.getitem, (call, 0)), (B, S, H), TOKENS)
    h = value(graph.call_function(ops.convert, (h, "tp", TOKENS, I)), (B, S, H), I)
    heads = value(graph.call_function(aten.reshape.default, (h, [B, 1, S, H])), (B, 1, S, H), I)
    seen = graph.call_function(ops.attention, (heads, heads, heads), {"is_causal": True})
    value(seen, (B, 1, S, H), I, module="attn")
    loss = value(graph.call_function(aten.sum.default, (seen,)), (), I, P)
    graph.output((h, loss))
    outputs = (Output("user", "hidden", 0), Output("loss", "loss"))
    inputs = (Input("x", Spec((B, S, H), torch.float32), 0),)
    blocks = {"layers.*": Block("layers.*", layer())}
    return Program(MESH, graph, blocks, params, inputs, outputs, form=Form.RESHARDED)
