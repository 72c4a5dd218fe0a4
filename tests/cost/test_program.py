"""The price of whole programs: published volumes as identities, closed forms against numbers, refusals."""

from collections import Counter
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost import closed_form, load, price
from autopar.cost.communication import inner_link
from autopar.cost.compute import node_cost
from autopar.cost.shares import local_shapes, local_value, mesh_sizes
from autopar.cost.symbols import axis_size
from autopar.errors import AutoparError
from autopar.ir.layout import I, Layout, P, R, Shard, chunk_sizes, local_shape, piece, plain_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Program, Spec
from tests.cost.build import Builder, Sizes, aten, layers

HW = load("h100")
TP, DP = axis_size("tp"), axis_size("dp")


def elements(program: Program) -> int:
    return sum(p.spec.bytes // p.spec.dtype.itemsize for p in program.params.values())


def test_gradient_sum_of_data_parallelism() -> None:
    """2Ψ(N-1)/N elements a step, from the closed form."""
    program = layers(Sizes(t=1), count=3)
    found = closed_form(program, HW).wire_bytes("dp", "gradient").subs({TP: 1})
    assert sympy.simplify(found - 2 * (2 * elements(program)) * (DP - 1) / DP) == 0
    assert closed_form(program, HW).calls("dp", "gradient", "all_reduce") == 1


def test_parameters_sharded_over_data_are_not_summed() -> None:
    """As experts are over ep: each rank's gradient is its own, and the engine sums the others only."""
    program, z = layers(Sizes(t=1)), Sizes()
    up = program.params["layers.0.up"]
    shard = plain_shard(0, 4 * z.h, z.d)
    assert up.layout and shard
    before = price(program, HW).wire_bytes("dp", "gradient")
    program.params[up.name] = replace(up, layout=up.layout.having("dp", shard))
    assert before - price(program, HW).wire_bytes("dp", "gradient") == 2 * up.spec.bytes * (z.d - 1) / z.d


def test_tensor_parallelism_is_two_all_reduces_each_way() -> None:
    z = Sizes()
    form = closed_form(layers(z, count=5), HW)
    for when in ("forward", "backward"):
        assert form.calls("tp", when) == form.calls("tp", when, "all_reduce") == 2 * 5
        whole = z.b * z.d * z.s * z.h * 2 / DP
        assert sympy.simplify(form.wire_bytes("tp", when) - 5 * 2 * 2 * whole * (TP - 1) / TP) == 0


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    z = Sizes()
    plain, sequence = closed_form(layers(z), HW), closed_form(layers(z, sequence=True), HW)
    for when in ("forward", "backward"):
        assert sympy.simplify(plain.wire_bytes("tp", when) - sequence.wire_bytes("tp", when)) == 0
        assert sequence.calls("tp", when, "all_gather") == sequence.calls("tp", when, "reduce_scatter") == 2
        assert sequence.calls("tp", when) == 4


def test_degree_one_communicates_nothing() -> None:
    for sequence in (False, True):
        form = closed_form(layers(Sizes(), sequence), HW).at({"dp": 1, "tp": 1})
        assert form.wire_bytes() == form.communication_seconds == 0
        alone = price(layers(Sizes(t=1, d=1), sequence), HW)
        assert alone.traffic == ()
        assert alone.flops[0] + alone.flops[1] == alone.model_flops


def test_compute_divides_over_both_axes() -> None:
    program = layers(Sizes(dropout=0.0))
    form = closed_form(program, HW)
    matmuls = sum(
        node_cost(n, local_shapes({"dp": DP, "tp": TP})).flops
        for n in program.blocks["layers.*"].graph.nodes
        if node_cost(n).kind in ("matmul", "attention")
    )
    z = Sizes()
    rows = z.b * z.d * z.s
    expected = rows * (24 * z.h**2 + 4 * z.s * z.h)
    assert sympy.simplify(matmuls * DP * TP - expected) == 0
    assert form.model_flops == price(program, HW).model_flops


def test_states_are_sixteen_bytes_of_each_local_element() -> None:
    program = layers(Sizes(dtype=torch.float32), count=2)
    form = closed_form(program, HW)
    norms, z = 2 * 2 * Sizes().h, Sizes()
    held = sum(form.memory[k] for k in ("parameters", "gradients", "optimizer"))
    assert sympy.simplify(held - 16 * (norms + 2 * 12 * z.h**2 / TP)) == 0
    assert form.memory["optimizer"] == 2 * form.memory["parameters"]


@settings(deadline=None, max_examples=12)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.booleans(), st.integers(1, 3))
def test_closed_form_at_sizes_is_the_price(t: int, d: int, sequence: bool, count: int) -> None:
    """One family: the form made at tp=4, dp=2 serves every degree that divides; layouts differ by axis size only."""
    z = Sizes(b=6, d=1, s=12, dropout=0.1)
    program = layers(replace(z, t=t, d=d, b=6 // d), sequence, count)
    links = dict.fromkeys(("dp", "tp"), inner_link(HW))
    exact = price(program, HW, links=links)
    form = closed_form(layers(replace(z, t=4, d=2, b=3), sequence, count), HW).at({"dp": d, "tp": t})
    assert form.flops == pytest.approx(exact.flops)
    assert form.compute_seconds == pytest.approx(exact.compute_seconds)
    assert form.memory == pytest.approx(dict(exact.memory))
    assert form.wire_bytes() == pytest.approx(exact.wire_bytes())
    assert form.communication_seconds == pytest.approx(exact.communication_seconds)
    assert form.model_flops == exact.model_flops


def test_blocks_are_weighted_by_their_calls() -> None:
    one, seven = price(layers(Sizes(), count=1), HW), price(layers(Sizes(), count=7), HW)
    assert seven.flops == tuple(7 * f for f in one.flops)
    assert seven.calls("tp", "forward") == 7 * one.calls("tp", "forward")
    assert seven.wire_bytes("tp") == 7 * one.wire_bytes("tp")
    assert seven.memory["parameters"] == 7 * one.memory["parameters"]
    assert seven.calls("dp", "gradient") == 1


def test_inference_has_no_backward() -> None:
    found = price(layers(Sizes()), HW, training=False)
    assert (
        found.flops[1] == found.compute_seconds[1] == found.wire_bytes(when="backward") == found.wire_bytes("dp") == 0
    )
    assert found.memory["activations"] == found.memory["gradients"] == found.memory["optimizer"] == 0
    assert found.memory["parameters"] == price(layers(Sizes()), HW).memory["parameters"]
    assert Counter(t.when for t in found.traffic) == {"forward": 1}


def test_values_without_gradient_send_nothing_back() -> None:
    def program(diff: bool) -> Program:
        build = Builder()
        layout = Layout((("tp", P),))
        x = build.placeholder("x", (4, 8), torch.float32, layout)
        y = build.convert(x, "tp", P, R)
        y.meta["diff"] = diff
        build.graph.output((y,))
        return Program(Mesh.parse("tp=2"), build.graph, {}, {}, (), (), form=Form.RESHARDED)

    assert price(program(True), HW).wire_bytes("tp") == 2 * 128
    assert price(program(False), HW).wire_bytes("tp") == 128


def test_a_converted_value_is_local_on_the_other_axes() -> None:
    build = Builder()
    rows = plain_shard(0, 4, 2)
    assert rows
    x = build.placeholder("x", (4, 8), torch.float32, Layout((("dp", rows), ("tp", P))))
    build.graph.output((build.convert(x, "tp", P, I),))
    program = Program(Mesh.parse("dp=2,tp=2"), build.graph, {}, {}, (), (), form=Form.RESHARDED)
    assert price(program, HW).wire_bytes("tp", "forward") == 4 * 8 * 4 / 2


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(5, 30), st.sampled_from([1, 2, 6]))
def test_local_sizes_are_those_of_the_largest_rank(ways: int, rows: int, inner: int) -> None:
    sizes = chunk_sizes(rows, ways)
    assume(min(sizes) > 0)
    mesh = Mesh.of({"tp": ways})
    shard = Shard(0, (piece(rows * inner, rows, inner, ways, sizes),))
    layout = Layout((("tp", shard),))
    largest = max(local_shape((rows * inner, 3), layout, mesh, at)[0] for at in mesh)
    found = local_value(Spec((rows * inner, 3), torch.float32), layout, mesh_sizes(mesh))
    assert found.shape == (largest, 3)


def test_segments_and_two_axes_on_one_dim() -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    fused = Shard(0, tuple(piece(n, n, 1, 4) for n in (32, 16, 16)))
    batch = Shard(0, (piece(32, 32, 1, 2),))
    spec = Spec((64, 8), torch.float32)
    assert local_value(spec, Layout((("tp", fused),)), mesh_sizes(mesh)).shape == (16, 8)
    flat = Shard(0, (piece(32, 8, 1, 4),))
    assert local_value(Spec((32,), torch.float32), Layout((("dp", batch), ("tp", flat))), mesh_sizes(mesh)).shape == (
        4,
    )


def test_forms_that_cannot_be_priced() -> None:
    program = layers(Sizes())
    program.form = Form.TRACED
    with pytest.raises(AutoparError) as error:
        price(program, HW)
    assert error.value.slug == "unpriced-form"
    program.form = Form.LOCAL
    with pytest.raises(AutoparError) as error:
        price(program, HW)
    assert error.value.slug == "unpriced-form"


def test_a_missing_layout_is_refused() -> None:
    program = layers(Sizes())
    node = next(n for n in program.blocks["layers.*"].graph.nodes if n.target is aten.gelu.default)
    del node.meta["layout"]
    with pytest.raises(AutoparError) as error:
        price(program, HW)
    assert error.value.slug == "missing-layout"
    assert "gelu" in error.value.message


@pytest.mark.parametrize(
    ("target", "args", "widths"),
    [
        (aten.softmax.int, (1,), {"forward": [4, 4], "backward": [4]}),
        (aten.log_softmax.int, (-2,), {"forward": [4, 4], "backward": [4]}),
        (aten.logsumexp.default, ([1],), {"forward": [4, 4]}),
        (aten.amax.default, ([1],), {"forward": [4, 4]}),
        (aten.max.dim, (1,), {"forward": [4, 8]}),
        (aten.softmax.int, (2,), {}),
    ],
)
def test_what_runs_along_a_shared_dim_sends_what_is_left_of_it(target, args, widths) -> None:
    """All-reduces of 2b(N-1)/N; rows that another axis shares out are this rank's."""
    build, n = Builder(), 4
    along = plain_shard(1, 64, n)
    rows = plain_shard(0, 6, 2)
    assert along and rows
    x = build.placeholder("x", (6, 64, 10), torch.bfloat16, Layout.of({"dp": rows, "cp": along}))
    soft = "softmax" in str(target)
    y = build.call(target, x, *args, layout=Layout.of({"dp": rows, "cp": along if soft else I}))
    if target is aten.max.dim:
        y.meta["layout"] = (y.meta["layout"],) * 2
    build.graph.output((y,))
    found = price(Program(Mesh.of({"dp": 2, "cp": n}), build.graph, {}, {}, (), (), form=Form.RESHARDED), HW)
    assert {t.collective for t in found.traffic} <= {"all_reduce"}
    for when in ("forward", "backward"):
        each = widths.get(when, [])
        assert found.calls("cp", when) == len(each)
        assert found.wire_bytes("cp", when) == sum(2 * w * 3 * 10 * (n - 1) / n for w in each)


def test_a_traced_program_on_one_rank() -> None:
    build = Builder()
    x = build.placeholder("x", (4, 8), torch.float32, Layout())
    build.graph.output((build.call(aten.exp.default, x),))
    found = price(Program(Mesh.of({}), build.graph, {}, {}, (), ()), HW)
    assert found.flops == (32, 32)
    assert found.traffic == () and found.memory["activations"] == 128
