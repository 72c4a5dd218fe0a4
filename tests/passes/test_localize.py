import pytest

from autopar.ir import ops
from autopar.ir.layout import local_shape
from autopar.ir.program import Form, specs
from autopar.runtime import collectives
from autopar.solve.annotate import layouts
from tests.passes.models import CASES, local

MESH = "dp=2,tp=2"
PIPELINE = "data-parallel,tensor-parallel,reshard"
SEQUENCE = "data-parallel,tensor-parallel{sequence},reshard"


@pytest.mark.parametrize("pipeline", (PIPELINE, SEQUENCE))
@pytest.mark.parametrize("name", CASES)
def test_every_value_has_its_local_size_and_no_conversion_is_left(name, pipeline):
    program = local(name, MESH, pipeline, 3)
    assert program.form == Form.LOCAL and program.at.items() >= program.mesh.coordinates(3).items()
    for _, graph in program.graphs():
        for node in graph.nodes:
            assert node.target not in (ops.convert, ops.dropout)
            if "global" in node.meta:
                whole = node.meta["global"]
                for have, want, lay in zip(specs(node), whole if isinstance(whole, tuple) else (whole,), layouts(node)):
                    assert have.shape == local_shape(want.shape, lay, program.mesh, program.at)


def test_axes_are_arguments_of_the_graphs_that_use_them():
    program = local("fused-tied", MESH, PIPELINE)
    for name, graph in program.graphs():
        handles = [n for n in graph.nodes if "handle" in n.meta]
        assert all(n.op == "placeholder" and n.users for n in handles)
        assert len({n.meta["handle"] for n in handles}) == len(handles)
        used = {a for n in graph.nodes for a in n.all_input_nodes if "handle" in a.meta and n.op == "call_function"}
        assert not name or used == set(handles)
    for call in program.calls():
        given = program.given(call)
        assert given and all(arg.meta.get("handle") == head.meta.get("handle") for head, arg in given)


def test_programs_of_ranks_differ_only_where_shards_do():
    def text(rank, rows=None):
        return [str(n.format_node()) for _, g in local("fused", MESH, PIPELINE, rank, rows).graphs() for n in g.nodes]

    assert text(0) == text(1) == text(3)
    assert text(0, (3, 2)) == text(1, (3, 2)) != text(2, (3, 2))


@pytest.mark.parametrize(
    ("pipeline", "wanted"),
    [(PIPELINE, {"to_replicated", "all_reduce_invariant"}), (SEQUENCE, {"all_gather", "reduce_scatter"})],
)
def test_conversions_become_collectives(pipeline, wanted):
    program = local("llama", MESH, pipeline)
    used = {
        n.target.__name__
        for _, g in program.graphs()
        for n in g.nodes
        if getattr(n.target, "__module__", "") == collectives.__name__
    }
    assert wanted <= used
