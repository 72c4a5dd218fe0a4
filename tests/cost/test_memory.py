"""Model states against the ZeRO paper's table, activations against Korthikanti et al."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import nn

from autopar.cost.compute import Shapes, Value
from autopar.cost.memory import MIXED_ADAM, activations, adamw, saved, states, storage
from autopar.cost.shares import local_shapes
from autopar.cost.symbols import Number, axis_size
from autopar.ir import ops
from autopar.ir.layout import I, Layout, R
from autopar.ir.mesh import Mesh
from autopar.ir.program import Block, Program, Spec
from tests.cost.build import Builder, Sizes, layers

aten = torch.ops.aten


def named(names: Mapping[int, Number], sizes: Mapping[str, Number]) -> Shapes:
    """Local shapes in which each global size is replaced by a symbol."""

    def shapes(node: object) -> tuple[Value | None, ...]:
        return tuple(
            Value(tuple(_rename(d, names) for d in v.shape), v.dtype) if v is not None else None
            for v in local(node)  # type: ignore[arg-type]
        )

    local = local_shapes(sizes)
    return shapes


def _rename(dim: Number, names: Mapping[int, Number]) -> Number:
    top, bottom = sympy.fraction(sympy.sympify(dim))
    return names.get(int(top), top) / bottom


# Table 1 of arXiv:1910.02054: gigabytes (1e9) of model states for 7.5 billion parameters by data-parallel degree.
ZERO = [
    (1, 120, 120, 120),
    (4, 52.5, 41.3, 30),
    (16, 35.6, 21.6, 7.5),
    (64, 31.4, 16.6, 1.88),
    (256, 30.4, 15.4, 0.47),
    (1024, 30.1, 15.1, 0.12),
]


@pytest.mark.parametrize(("n", "one", "two", "three"), ZERO)
def test_zero_table(n: int, one: float, two: float, three: float) -> None:
    found = [float(states(7_500_000_000, MIXED_ADAM, stage, n).total) / 1e9 for stage in (1, 2, 3)]
    assert found == pytest.approx([one, two, three], abs=0.06)


def test_zero_formulas() -> None:
    psi, n = sympy.symbols("psi N", positive=True)
    assert states(psi, MIXED_ADAM).total == 16 * psi
    for stage, bytes_each in ((1, 4 + 12 / n), (2, 2 + 14 / n), (3, 16 / n)):
        assert sympy.expand(states(psi, MIXED_ADAM, stage, n).total - psi * bytes_each) == 0


def test_adamw_keeps_two_moments_of_the_parameters_dtype() -> None:
    model = nn.Linear(3, 5, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    held = states(20, adamw(torch.float64))
    assert held.optimizer == sum(m.numel() * m.element_size() for m in moments)
    assert held.gradients == sum(p.grad.numel() * 8 for p in model.parameters() if p.grad is not None)


def korthikanti(sequence: bool) -> Number:
    """Activation bytes that one more layer adds, in symbols s, b, h, a and tp, on one data rank."""
    z = Sizes(d=1)
    s, b, h, a = sympy.symbols("s b h a", positive=True)
    names = {z.s: s, z.b: b, z.h: h, z.a: a, z.h // z.a: h / a, 4 * z.h: 4 * h}
    shapes = named(names, {"dp": 1, "tp": axis_size("tp")})
    return activations(layers(z, sequence, count=2), shapes) - activations(layers(z, sequence), shapes)


def paper(per_token: Number) -> Number:
    s, b, h = sympy.symbols("s b h", positive=True)
    return s * b * h * per_token


@pytest.mark.parametrize("sequence", [False, True])
def test_activations_of_a_layer(sequence: bool) -> None:
    """sbh(34 + 5as/h) on one rank; sbh(10 + 24/t + 5as/ht) on t (arXiv:2205.05198, equations 1 and 2, in fp16).

    Two things that the paper leaves out: the statistics of the two norms (two fp32 a token each), and, under
    sequence parallelism, the two gathered inputs of the matmuls, which our program keeps (the paper gathers again).
    """
    s, b, h, a = sympy.symbols("s b h a", positive=True)
    t = axis_size("tp")
    statistics = 16 * s * b
    if sequence:
        expected = paper(4 + 30 / t + 5 * a * s / (h * t)) + statistics / t
    else:
        expected = paper(10 + 24 / t + 5 * a * s / (h * t)) + statistics
    found = korthikanti(sequence)
    assert sympy.simplify(found - expected) == 0
    assert sympy.simplify((found - paper(34 + 5 * a * s / h) - statistics).subs({t: 1})) == 0


def test_layers_add_up() -> None:
    z = Sizes()
    one, many = (activations(layers(z, count=n), local_shapes({"dp": z.d, "tp": z.t})) for n in (1, 5))
    # The first layer's input is the caller's; that of each later one is saved by its first norm.
    assert many == 5 * one + 4 * z.b * z.s * z.h * 2


def test_a_value_saved_by_two_ops_counts_once_and_views_not_at_all() -> None:
    build = Builder()
    x = build.placeholder("x", (4, 8), torch.float32, Layout())
    y = build.call(aten.exp.default, x)
    view = build.call(aten.reshape.default, y, [8, 4])
    part = build.call(aten.split_with_sizes.default, view, [2, 2], 1)
    build.call(aten.mul.Tensor, y, y)
    build.call(aten.sin.default, view)
    assert storage(view) is y and storage(part) is y
    build.graph.output(())
    program = Program(Mesh.of({}), build.graph, {}, {}, (), ())
    assert activations(program, local_shapes({})) == 4 * 8 * 4


def test_conversions_that_move_nothing_share_memory() -> None:
    build = Builder()
    x = build.placeholder("x", (4, 8), torch.float32, Layout((("tp", I),)))
    same = build.convert(x, "tp", I, R)
    assert storage(same) is x


F = torch.nn.functional
X = (6, 6)
CASES: list[tuple[Any, Callable[..., Any], tuple[tuple[int, ...], ...], tuple[Any, ...]]] = [
    (aten.mul.Tensor, torch.mul, (X, X), ()),
    (aten.div.Tensor, torch.div, (X, X), ()),
    (aten.add.Tensor, torch.add, (X, X), ()),
    (aten.mm.default, torch.mm, (X, X), ()),
    (aten.addmm.default, torch.addmm, ((6,), X, X), ()),
    (aten.bmm.default, torch.bmm, ((2, 3, 4), (2, 4, 5)), ()),
    (aten.linear.default, F.linear, ((4, 6), (8, 6), (8,)), ()),
    (aten.exp.default, torch.exp, (X,), ()),
    (aten.silu.default, F.silu, (X,), ()),
    (aten.sigmoid.default, torch.sigmoid, (X,), ()),
    (aten.rsqrt.default, torch.rsqrt, (X,), ()),
    (aten.relu.default, torch.relu, (X,), ()),
    (aten.tanh.default, torch.tanh, (X,), ()),
    (aten.sin.default, torch.sin, (X,), ()),
    (aten.gelu.default, F.gelu, (X,), ()),
    (aten.neg.default, torch.neg, (X,), ()),
    (aten.pow.Tensor_Scalar, torch.pow, (X,), (3,)),
    (aten.sum.dim_IntList, torch.sum, (X,), ([1],)),
    (aten.mean.dim, torch.mean, (X,), ([1],)),
    (aten.cumsum.default, torch.cumsum, (X,), (1,)),
    (aten.softmax.int, torch.softmax, (X,), (1,)),
    (aten.log_softmax.int, torch.log_softmax, (X,), (1,)),
    (aten.layer_norm.default, F.layer_norm, (X,), ([6],)),
    (
        aten.convolution.default,
        torch.convolution,
        ((2, 3, 8, 8), (4, 3, 2, 2)),
        (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    ),
]


def held_by_autograd(function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], rest: tuple[Any, ...]) -> int:
    """Bytes of the distinct tensors that autograd keeps when the function runs."""
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*(torch.rand(*s, requires_grad=True) for s in shapes), *rest)
    return sum(kept.values())


@pytest.mark.parametrize(("target", "function", "inputs", "rest"), CASES, ids=[c[1].__name__ for c in CASES])
def test_saved_is_what_autograd_saves(
    target: Any, function: Callable[..., Any], inputs: tuple[tuple[int, ...], ...], rest: tuple[Any, ...]
) -> None:
    build = Builder()
    given = [build.placeholder(f"x{i}", shape, torch.float32, Layout()) for i, shape in enumerate(inputs)]
    mine = saved(build.call(target, *given, *rest), local_shapes({}))
    values = [local_shapes({})(owner)[0] for owner in {storage(v) for v in mine.values}]
    assert sum(v.bytes for v in values if v) + mine.extra == held_by_autograd(function, inputs, rest)


def test_fused_attention_saves_its_output_and_one_number_a_row() -> None:
    build, shape = Builder(), (2, 3, 16, 8)
    given = [build.placeholder(n, shape, torch.float32, Layout()) for n in "qkv"]
    node = build.call(ops.attention, *given)
    mine = saved(node, local_shapes({}))
    assert set(mine.values) == {*given, node}
    assert mine.extra == 4 * 2 * 3 * 16


def test_unknown_ops_save_everything() -> None:
    build = Builder()
    x = build.placeholder("x", (4,), torch.float32, Layout())
    node = build.call(aten.digamma.default, x)
    assert set(saved(node, local_shapes({})).values) == {x, node}
    assert saved(build.call(ops.dropout, x, 0.5, 1), local_shapes({})).extra == 4


def test_a_frozen_weight_does_not_keep_its_input() -> None:
    build = Builder()
    x = build.placeholder("x", (4, 8), torch.float32, Layout())
    w = build.placeholder("w", (6, 8), torch.float32, Layout())
    w.meta["diff"] = False
    assert saved(build.call(aten.linear.default, x, w), local_shapes({})).values == (w,)


def test_a_block_output_that_the_block_keeps_counts_once() -> None:
    """The output is exp(x), which exp keeps inside the block and sin keeps outside; its view shares the memory."""
    inner, outer = Builder(), Builder()
    y = inner.call(aten.exp.default, inner.placeholder("x", (4, 8), torch.float32, Layout()))
    inner.graph.output((inner.call(aten.reshape.default, y, [8, 4]),))
    x = outer.placeholder("x", (4, 8), torch.float32, Layout(), input=0)
    call = outer.graph.create_node("call_module", "block", (x,))
    call.meta["spec"] = (Spec((8, 4), torch.float32),)
    out = outer.graph.call_function(operator.getitem, (call, 0))
    out.meta.update(spec=Spec((8, 4), torch.float32), diff=True)
    outer.call(aten.sin.default, out)
    outer.graph.output(())
    program = Program(Mesh.of({}), outer.graph, {"block": Block("block", inner.graph)}, {}, (), ())
    assert activations(program, local_shapes({})) == 4 * 8 * 4
