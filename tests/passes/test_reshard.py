import pytest

from autopar.ir import ops
from autopar.ir.layout import Shard
from autopar.ir.program import Form
from tests.passes.models import CASES, planned

PIPELINES = ("data-parallel,tensor-parallel", "data-parallel,tensor-parallel{sequence}")


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", CASES)
def test_each_conversion_is_made_once_and_used(name, pipeline):
    program = planned(name, "dp=2,tp=2", f"{pipeline},reshard")
    assert program.form == Form.RESHARDED
    for _, graph in program.graphs():
        made = [n for n in graph.nodes if n.target is ops.convert]
        assert len({n.args for n in made}) == len(made)
        assert all(n.users and n.args[2] != n.args[3] for n in made)
        assert not [n for n in graph.nodes if "requires" in n.meta]
        assert all({"spec", "layout", "diff", "module"} <= set(n.meta) or n.args[0].op == "placeholder" for n in made)


def test_a_conversion_to_a_shard_comes_first():
    """Of several steps those that make the value smaller."""
    program = planned("fused-tied", "dp=2,tp=2", f"{PIPELINES[1]},reshard")
    for _, graph in program.graphs():
        for node in graph.nodes:
            before = node.args[0] if node.target is ops.convert else None
            if before is not None and before.target is ops.convert:
                assert not (isinstance(node.args[3], Shard) and not isinstance(before.args[3], Shard))


def test_without_parallelism_there_is_nothing_to_convert():
    program = planned("fused-tied", "dp=1,tp=1", f"{PIPELINES[0]},reshard")
    assert not [n for _, g in program.graphs() for n in g.nodes if n.target is ops.convert]
