import pytest

from autopar.ir import ops
from autopar.ir.layout import I, Layout, R, Shard, plain_shard
from autopar.ir.program import Form
from autopar.passes.reshard import steps_between
from autopar.solve.annotate import clash
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


ROWS, COLUMNS = plain_shard(0, 8, 2), plain_shard(1, 8, 2)


@pytest.mark.parametrize("diff", [True, False])
@pytest.mark.parametrize("cp", [ROWS, COLUMNS, R, I])
@pytest.mark.parametrize("tp", [ROWS, COLUMNS, R, I])
@pytest.mark.parametrize(("a", "b"), [(ROWS, COLUMNS), (COLUMNS, R), (R, ROWS)])
def test_no_two_axes_share_out_the_same_elements_on_the_way(a, b, tp, cp, diff):
    """A dim that one axis takes over from another, and two dims that change places."""
    if isinstance(tp, Shard) and tp == cp:
        return
    have, wanted = Layout.of({"tp": a, "cp": b}), Layout.of({"tp": tp, "cp": cp})
    for axis, src, dst in steps_between(have, wanted, diff):
        assert have[axis] == src != dst
        assert not clash(dst, have.having(axis, I))
        have = have.having(axis, dst)
    assert all(have[n] == t or (not diff and {have[n], t} == {I, R}) for n, t in wanted.types)
