"""Break each invariant of layouts; the check must name it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import I, P, Piece, R, Shard, Type, plain_shard
from autopar.ir.program import Form, Program
from autopar.rules.table import relation
from autopar.solve.annotate import layouts
from autopar.verify import check_program
from autopar.verify.layouts import check_layouts, check_params
from tests.passes.models import planned

SEQUENCE = "data-parallel,tensor-parallel{sequence},reshard"
PLAIN = "data-parallel,tensor-parallel,reshard"
MODELS = {
    "llama": ("llama", PLAIN),
    "llama-sequence": ("llama", SEQUENCE),
    "fused-tied": ("fused-tied", PLAIN),
    "fused-tied-sequence": ("fused-tied", SEQUENCE),
}


def resharded(name: str) -> Program:
    model, pipeline = MODELS[name]
    return planned(model, "dp=2,tp=2", pipeline)


def conversions(program: Program) -> list[tuple[str, int]]:
    """(graph, index) of every conversion."""
    return [(g, i) for g, graph in program.graphs() for i, n in enumerate(graph.nodes) if n.target is ops.convert]


def node_at(program: Program, place: tuple[str, int]) -> fx.Node:
    return list(dict(program.graphs())[place[0]].nodes)[place[1]]


def refused(program: Program, *slugs: str) -> str:
    with pytest.raises(AutoparError) as caught:
        check_program(program, "a-pass")
    assert caught.value.slug in (slugs or ("layout-mismatch", "output-layout")), caught.value
    assert "->" in caught.value.message
    return str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_no_conversion_can_be_deleted(name: str) -> None:
    program = resharded(name)
    places, kinds = conversions(program), set()
    assert len(places) > 5
    check_program(program)
    for place in places:
        broken = program.clone()
        node = node_at(broken, place)
        _, _, src, dst = node.args
        kinds.add(type(src).__name__[0] + type(dst).__name__[0])
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)
        try:
            check_layouts(broken)
        except AutoparError as error:
            assert error.slug in ("layout-mismatch", "output-layout")
            continue
        raise AssertionError(f"{name}: nothing misses {place}: {node.format_node()}")
    assert kinds >= ({"IR", "PI"} if name in ("llama", "fused-tied") else {"PS"}), kinds


@pytest.mark.parametrize("name", MODELS)
def test_no_reader_of_a_conversion_can_go_around_it(name: str) -> None:
    """Each reader alone is given the unconverted value."""
    program = resharded(name)
    for place in conversions(program):
        for k in range(len(node_at(program, place).users)):
            broken = program.clone()
            node = node_at(broken, place)
            user = list(node.users)[k]
            user.replace_input_with(node, node.args[0])
            refused(broken)


@pytest.mark.parametrize("name", MODELS)
def test_no_conversion_can_be_doubled(name: str) -> None:
    program = resharded(name)
    for place in conversions(program):
        broken = program.clone()
        node = node_at(broken, place)
        with node.graph.inserting_after(node):
            again = node.graph.call_function(ops.convert, (node, *node.args[1:]))
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again, delete_user_cb=lambda n, again=again: n is not again)
        assert "converts from" in refused(broken, "layout-mismatch")


def _sums(node: fx.Node, axis: str) -> bool:
    """Whether the node passes a sum through and leaves a term of it on the axis."""
    sums = node.op == "call_function" and any(a.inputs == (P,) for a in relation(node).partials())
    return sums and layouts(node)[0].get(axis) == P


@pytest.mark.parametrize("name", MODELS)
def test_no_conversion_can_have_another_type(name: str) -> None:
    """Its target replaced by each other type, in the node and in its layout."""
    program = resharded(name)
    for place in conversions(program):
        node = node_at(program, place)
        x, axis, src, dst = node.args
        diff = bool(node.meta.get("diff"))
        others = [
            t
            for t in (I, R, P, plain_shard(0, node.meta["spec"].shape[0], 2) if node.meta["spec"].shape else None)
            if t
        ]
        for other in others:
            if other in (src, dst) or (not diff and {other, dst} <= {I, R}) or (not diff and {other, src} <= {I, R}):
                continue
            if other == P and all(_sums(user, axis) for user in node.users):
                continue  # its terms are summed in place of its shares: right as well (tests/rules proves sums of P)
            broken = program.clone()
            wrong = node_at(broken, place)
            wrong.args = (*wrong.args[:3], other)
            wrong.meta["layout"] = wrong.meta["layout"].having(axis, other)
            try:
                check_layouts(broken)
            except AutoparError:
                continue
            raise AssertionError(
                f"{place}: {dst} as {other} on {axis} is not missed: {[u.format_node() for u in node.users]}"
            )


def test_two_axes_cannot_share_out_the_same_elements() -> None:
    program = resharded("llama").clone()
    node = first(program, lambda n: n.target is ops.convert and n.args[1] == "tp" and n.meta["layout"].get("dp") != I)
    rows = node.meta["layout"]["dp"]
    node.meta["layout"] = node.meta["layout"].having("tp", rows)
    assert "share out the same elements" in refused(program, "layout-mismatch")


def first(program: Program, wanted: Callable[[fx.Node], bool]) -> fx.Node:
    return next(n for _, graph in program.graphs() for n in graph.nodes if wanted(n))


def named(part: str) -> Callable[[fx.Node], bool]:
    return lambda n: n.op == "call_function" and part in str(n.target) and n.meta["diff"]


def test_a_conversion_says_what_it_converts_from() -> None:
    program = resharded("llama").clone()
    node = first(program, lambda n: n.target is ops.convert and n.args[2] == P)
    node.args = (*node.args[:2], R, node.args[3])
    assert "converts from R, but its input is P" in refused(program, "layout-mismatch")


def test_a_conversion_changes_only_its_axis() -> None:
    program = resharded("llama").clone()
    node = first(program, lambda n: n.target is ops.convert and n.args[1] == "tp")
    node.meta["layout"] = node.meta["layout"].having("dp", I)
    refused(program, "layout-mismatch")


def test_a_conversion_s_layout_is_its_target() -> None:
    program = resharded("llama").clone()
    node = first(program, lambda n: n.target is ops.convert and n.args[3] == R)
    node.meta["layout"] = node.meta["layout"].having("tp", I)
    refused(program, "layout-mismatch")


@pytest.mark.parametrize("form", (Form.ANNOTATED, Form.RESHARDED))
@pytest.mark.parametrize("op", ("linear", "silu", "attention", "embedding", "token_loss", "sum", "mul.Tensor"))
def test_an_op_makes_its_output_from_its_inputs(op: str, form: Form) -> None:
    """Each output type replaced by each other one."""
    program = (
        resharded("llama") if form == Form.RESHARDED else planned("llama", "dp=2,tp=2", PLAIN.removesuffix(",reshard"))
    )
    have = first(program, named(op)).meta["layout"]
    for axis, kind in have.types:
        for other in (I, R, P):
            if other != kind:
                broken = program.clone()
                first(broken, named(op)).meta["layout"] = have.having(axis, other)
                refused(broken, "layout-mismatch")


def test_what_a_block_is_given_is_what_it_takes() -> None:
    program = resharded("llama").clone()
    call = next(program.calls())
    call.args[0].meta["layout"] = call.args[0].meta["layout"].having("tp", P)
    refused(program, "layout-mismatch")
    program = resharded("llama").clone()
    block = next(iter(program.blocks.values()))
    hidden = next(n for n in block.graph.nodes if n.op == "placeholder")
    hidden.meta["layout"] = hidden.meta["layout"].having("tp", R)
    refused(program, "layout-mismatch")


def test_what_a_call_makes_is_what_the_block_returns() -> None:
    program = resharded("llama").clone()
    call = next(program.calls())
    call.meta["layout"] = tuple(lay.having("tp", R) for lay in call.meta["layout"])
    refused(program, "layout-mismatch")


def output_node(program: Program) -> fx.Node:
    return next(n for n in reversed(program.graph.nodes) if n.op == "output")


@pytest.mark.parametrize(("kind", "other"), [("loss", I), ("loss", R), ("user", R), ("user", P)])
def test_outputs_are_what_the_caller_expects(kind: str, other: object) -> None:
    """The loss is a term over dp; what the model returns is whole over tp."""
    program = resharded("llama").clone()
    axis = "dp" if kind == "loss" else "tp"
    index = next(i for i, o in enumerate(program.outputs) if o.kind == kind)
    out = output_node(program)
    value = out.args[0][index]
    wrong = value.meta["layout"].having(axis, other)
    with program.graph.inserting_before(out):
        node = program.graph.call_function(ops.convert, (value, axis, value.meta["layout"][axis], other))
    node.meta = {**value.meta, "layout": wrong}
    out.args = (tuple(node if i == index else a for i, a in enumerate(out.args[0])),)
    refused(program, "output-layout")


def test_rows_of_an_output_are_those_of_the_inputs() -> None:
    """An output with a batch dim is shared out as the inputs are, not in another way and not as a sum."""
    program = resharded("llama")
    index = next(i for i, o in enumerate(program.outputs) if o.kind == "user" and o.batch_dim is not None)
    for other in (plain_shard(1, 6, 2), P, R):
        broken = program.clone()
        out = output_node(broken)
        value = out.args[0][index]
        with broken.graph.inserting_before(out):
            node = broken.graph.call_function(ops.convert, (value, "dp", value.meta["layout"]["dp"], other))
        node.meta = {**value.meta, "layout": value.meta["layout"].having("dp", other)}
        out.args = (tuple(node if i == index else a for i, a in enumerate(out.args[0])),)
        refused(broken, "output-layout")


def placeholder(program: Program, key: str) -> fx.Node:
    return first(program, lambda n: n.op == "placeholder" and key in n.meta)


@pytest.mark.parametrize("form", (Form.ANNOTATED, Form.RESHARDED))
@pytest.mark.parametrize(("axis", "kind"), [("dp", I), ("dp", P), ("tp", R), ("tp", P)])
def test_parameters_are_held_so_that_one_reducer_sums_each_gradient(axis: str, kind: Type, form: Form) -> None:
    program = (
        resharded("llama") if form == Form.RESHARDED else planned("llama", "dp=2,tp=2", PLAIN.removesuffix(",reshard"))
    )
    check_params(program)
    program = program.clone()
    node = placeholder(program, "param")
    node.meta["layout"] = node.meta["layout"].having(axis, kind)
    param = program.params[node.meta["param"]]
    program.params[param.name] = replace(param, layout=node.meta["layout"])
    with pytest.raises(AutoparError) as caught:
        check_params(program)
    assert caught.value.slug == "param-layout" and param.name in caught.value.message
    with pytest.raises(AutoparError):
        check_layouts(program)


def test_the_graph_and_the_table_agree_about_parameters() -> None:
    program = resharded("llama").clone()
    node = placeholder(program, "param")
    param = program.params[node.meta["param"]]
    assert param.layout is not None
    program.params[param.name] = replace(
        param,
        layout=param.layout.having("tp", plain_shard(0, param.spec.shape[0], 2) if param.layout["tp"] == I else I),
    )
    assert param.name in refused(program, "param-layout")


@pytest.mark.parametrize("other", [I, P, plain_shard(1, 6, 2), Shard(0, (Piece(4, 2, 1),))], ids=str)
def test_inputs_are_the_rows_that_the_caller_has(other: Type) -> None:
    """Also refused: every other row, and another dim."""
    program = resharded("llama").clone()
    ids = placeholder(program, "input")
    with program.graph.inserting_after(ids):
        back = program.graph.call_function(ops.convert, (ids, "dp", other, ids.meta["layout"]["dp"]))
    back.meta = dict(ids.meta)
    ids.replace_all_uses_with(back, delete_user_cb=lambda n: n is not back)
    ids.meta["layout"] = ids.meta["layout"].having("dp", other)
    assert "input_ids" in refused(program, "input-layout")


def test_types_are_equal_for_a_value_without_gradient() -> None:
    """R and I are one where no gradient flows, and only there."""
    program = resharded("llama").clone()
    ids = placeholder(program, "input")
    assert not ids.meta["diff"]
    ids.meta["layout"] = ids.meta["layout"].having("tp", R)
    check_layouts(program)
    hidden = first(program, lambda n: n.target is ops.convert and n.args[1:] == ("tp", P, I))
    hidden.meta["layout"] = hidden.meta["layout"].having("tp", R)
    refused(program, "layout-mismatch")
