"""A small model with every kind of parameter, and its LOCAL program written by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.emit.module import ParallelModule
from autopar.emit.params import Place, initialise
from autopar.ir.layout import I, Layout, R, Shard, Type, piece, plain_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Block, Form, Input, Output, Param, Program, Spec
from autopar.runtime.collectives import all_reduce_invariant, to_replicated

aten = torch.ops.aten
DTYPE = torch.float64
WIDE, WIDTH, INNER, LAYERS = 8, 6, 5, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH, dtype=DTYPE))
        self.up = nn.Linear(WIDTH, 2 * INNER, dtype=DTYPE)
        self.down = nn.Linear(INNER, WIDTH, bias=False, dtype=DTYPE)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=DTYPE))
        self.frozen = nn.Parameter(torch.randn(WIDTH, dtype=DTYPE), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        a, b = self.up(h * self.gain).split(INNER, -1)
        return h + self.down(torch.tanh(a) * b) * self.scale * self.frozen


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDE, bias=False, dtype=DTYPE)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.spare = nn.Parameter(torch.randn(3, dtype=DTYPE))
        self.head = nn.Linear(WIDTH, WIDE, bias=False, dtype=DTYPE)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=DTYPE))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.count = self.count + 1
        h = x @ self.embed.weight
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        return {"logits": logits, "loss": (logits**2).sum()}


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def model_axis(mesh: Mesh) -> str:
    """The axis that shards layers: tp, or the major part of it."""
    return mesh.parts("tp")[0]


def table(mesh: Mesh) -> dict[str, Param]:
    """Parameters with layouts: the fused, uneven ``up`` in two segments, ``down`` by column, the others whole."""
    tp = mesh.size(model_axis(mesh))
    cut = piece(INNER, INNER, 1, tp, plain_shard(0, INNER, tp).pieces[0].sizes)  # type: ignore[union-attr]
    kinds: dict[str, Type] = {
        "up.weight": Shard(0, (cut, cut)),
        "up.bias": Shard(0, (cut, cut)),
        "down.weight": Shard(1, (cut,)),
    }
    model, out, axis = Tiny(), {}, model_axis(mesh)
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        on_tp = next((t for key, t in kinds.items() if name.endswith(key)), I)
        layout = Layout.of({a: R if mesh.is_data(a) else on_tp if a == axis else I for a in mesh.names})
        kind = "parameter" if isinstance(p, nn.Parameter) else "buffer"
        tied = ("head.weight",) if name == "embed.weight" else ()
        out[name] = Param(name, Spec(tuple(p.shape), DTYPE), kind, p.requires_grad, True, tied, layout)
    return out


def block(axis: str) -> fx.Graph:
    """One layer on local tensors."""
    g = fx.Graph()
    h = g.placeholder("h")
    named = {}
    for name in ("gain", "up.weight", "up.bias", "down.weight", "scale", "frozen"):
        named[name] = g.placeholder(name.replace(".", "_"))
        named[name].meta["param"] = name
    tp = g.placeholder("tp")
    tp.meta["handle"] = axis
    n = g.call_function(to_replicated, (g.call_function(aten.mul.Tensor, (h, named["gain"])), tp))
    u = g.call_function(aten.linear.default, (n, named["up.weight"], named["up.bias"]))
    halves = g.call_function(aten.chunk.default, (u, 2, -1))
    a, b = (g.call_function(getitem, (halves, i)) for i in range(2))
    z = g.call_function(aten.mul.Tensor, (g.call_function(aten.tanh.default, (a,)), b))
    y = g.call_function(all_reduce_invariant, (g.call_function(aten.linear.default, (z, named["down.weight"])), tp))
    for name in ("scale", "frozen"):
        y = g.call_function(aten.mul.Tensor, (y, named[name]))
    g.output((g.call_function(aten.add.Tensor, (h, y)),))
    return g


def program(mesh: Mesh, at: Mapping[str, int], loss_only: bool) -> Program:
    """The LOCAL program of ``Tiny``; it has no size of the batch in it."""
    params, g, axis = table(mesh), fx.Graph(), model_axis(mesh)
    env = {}
    for name in (n for n in params if not n.startswith("layers.")):
        env[name] = g.placeholder(name.replace(".", "_"))
        env[name].meta["param"] = name
    x = g.placeholder("x")
    x.meta["input"] = 0
    tp = g.placeholder("tp")
    tp.meta["handle"] = axis
    h = g.call_function(aten.matmul.default, (x, env["embed.weight"]))
    for i in range(LAYERS):
        call = g.call_module("layer", (h, tp))
        call.meta["path"] = f"layers.{i}"
        h = g.call_function(getitem, (call, 0))
    logits = g.call_function(aten.linear.default, (h, env["embed.weight"]))
    loss = g.call_function(aten.sum.default, (g.call_function(aten.pow.Tensor_Scalar, (logits, 2)),))
    count = g.call_function(aten.add.Tensor, (env["count"], 1))
    outputs = {"loss": loss, "count": count} if loss_only else {"logits": logits, "loss": loss, "count": count}
    g.output(tuple(outputs.values()))
    kinds = {"logits": Output("user", "logits", 0), "loss": Output("loss" if loss_only else "user", "loss")}
    kinds["count"] = Output("buffer", "count")
    inputs = (Input("x", Spec((4, WIDE), DTYPE), 0),)
    blocks = {"layer": Block("layer", block(axis))}
    return Program(mesh, g, blocks, params, inputs, tuple(kinds[o] for o in outputs), form=Form.LOCAL, at=dict(at))


@dataclass
class OneTensor:
    """Structure of a call with one tensor."""

    names: tuple[str, ...]

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        return [*args, *kwargs.values()]

    def rebuild(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.names, tensors))


@dataclass
class TinyVariant:
    program: Program
    structure: OneTensor


@dataclass
class TinyCompiler:
    place: Place
    made: dict[bool, TinyVariant] = field(default_factory=dict)

    def variant(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool, loss_only: bool, grad: bool
    ) -> TinyVariant:
        if loss_only not in self.made:
            p = program(self.place.mesh, self.place.at, loss_only)
            self.made[loss_only] = TinyVariant(p, OneTensor(("loss",) if loss_only else ("logits", "loss")))
        return self.made[loss_only]


def parallel(place: Place, model: nn.Module | None = None) -> ParallelModule:
    """``Tiny`` on the mesh."""
    compiler = TinyCompiler(place)
    first = compiler.variant((), {}, train=True, loss_only=False, grad=True).program
    tensors = initialise(model or tiny(), first.params, place)
    return ParallelModule(compiler, first, place, tensors, place.axes)


def batch(seed: int = 1) -> Tensor:
    """Five rows, so that two data ranks hold three and two."""
    return torch.randn(5, WIDE, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def mine(x: Tensor, place: Place) -> Tensor:
    """This data rank's rows."""
    at = {axis: handle.coordinate for axis, handle in place.axes.items()}
    return x.tensor_split(place.mesh.data_size)[place.mesh.data_rank(at)]
