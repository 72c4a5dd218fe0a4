"""Break a graph; the check must name the fault and show the lines around it."""

import pytest
from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import I, P
from autopar.ir.program import Form, Program
from autopar.verify import check_program
from autopar.verify.structure import check_structure
from tests.passes.models import planned, traced

TRACED = "tied", "dp=2,tp=2"
PIPELINE = ("data-parallel", "tensor-parallel", "reshard", "localize")


def program(after: str | None = None) -> Program:
    if after is None:
        return traced(*TRACED).clone()
    return planned(*TRACED, ",".join(PIPELINE[: PIPELINE.index(after) + 1])).clone()


def op_of(p: Program) -> fx.Node:
    block = next(iter(p.blocks.values()))
    return next(n for n in block.graph.nodes if n.op == "call_function")


def refused(p: Program, slug: str) -> str:
    with pytest.raises(AutoparError) as caught:
        check_structure(p, "a-pass{option}")
    assert caught.value.slug == slug and "a-pass{option}" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("after", (None, *PIPELINE))
def test_every_form_is_well_formed(after):
    check_program(program(after))


@pytest.mark.parametrize("after", (None, "tensor-parallel", "localize"))
def test_a_node_without_a_spec(after):
    p = program(after)
    del op_of(p).meta["spec"]
    assert "-> " in refused(p, "no-metadata")


@pytest.mark.parametrize("after", ("data-parallel", "reshard", "localize"))
def test_a_node_without_a_layout(after):
    p = program(after)
    del op_of(p).meta["layout"]
    refused(p, "no-metadata")


@pytest.mark.parametrize("after", (None, "tensor-parallel", "localize"))
def test_a_conversion_where_none_may_be(after):
    p = program(after)
    node = op_of(p)
    with node.graph.inserting_after(node):
        new = node.graph.call_function(ops.convert, (node, "tp", P, I))
    new.meta = dict(node.meta)
    refused(p, "wrong-form")


def test_a_value_that_is_used_before_it_is_made():
    p = program()
    node = op_of(p)
    user = next(iter(node.users))
    node.prepend(user)
    refused(p, "bad-graph")


@pytest.mark.parametrize("kind", ("get_attr", "call_method"))
def test_an_op_of_another_kind(kind):
    p = program()
    node = op_of(p)
    with node.graph.inserting_after(node):
        new = node.graph.create_node(kind, "relu", (node,) if kind == "call_method" else ())
    new.meta = dict(node.meta)
    new.graph.owning_module = None
    refused(p, "bad-graph")


def test_a_call_with_too_few_arguments():
    p = program()
    call = next(p.calls())
    call.args = call.args[:-1]
    assert "arguments" in refused(p, "bad-graph")


def test_a_call_that_reads_a_parameter_that_there_is_not():
    p = program()
    call = next(p.calls())
    call.meta["path"] = "layers.7"
    assert "layers.7." in refused(p, "bad-graph")


def test_the_message_shows_ten_lines_and_the_types():
    p = program("reshard")
    node = op_of(p)
    del node.meta["spec"]
    lines = refused(p, "no-metadata").splitlines()
    assert 3 <= len(lines) <= 11
    assert [line for line in lines if line.startswith("-> ")] == [line for line in lines if node.name + " :" in line]
    assert any("'dp'" in line for line in lines)
    assert p.form == Form.RESHARDED
