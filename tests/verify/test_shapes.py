"""A LOCAL program whose sizes are wrong at some rank."""

from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.ir.program import Form, Program, Spec
from autopar.rules.table import aten
from autopar.verify import check_program
from autopar.verify.shapes import check_shapes
from tests.passes.models import local

PIPELINE = "data-parallel,tensor-parallel,reshard"
CASES = {"fused-tied": None, "uneven": (3, 2)}


def local_of(case: str = "fused-tied", rank: int = 0) -> Program:
    return local("fused-tied", "dp=2,tp=2", PIPELINE, rank, CASES[case])


def node_of(program: Program, target: object) -> fx.Node:
    return next(n for _, graph in program.graphs() for n in graph.nodes if n.target is target)


def refused(program: Program) -> str:
    with pytest.raises(AutoparError) as caught:
        check_shapes(program, "localize")
    assert caught.value.slug == "wrong-shape"
    return caught.value.message


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("case", CASES)
def test_every_rank(case, rank):
    program = local_of(case, rank)
    assert program.form == Form.LOCAL
    check_program(program)


def test_ranks_with_uneven_rows_differ():
    specs = [node_of(local_of("uneven", r), aten.layer_norm.default).meta["spec"] for r in (0, 2)]
    assert [s.shape[0] for s in specs] == [3, 2]


@pytest.mark.parametrize("case", CASES)
def test_every_literal_size_counts(case):
    """Each literal size that localize wrote, enlarged by one."""
    program, seen = local_of(case), 0
    for name, graph in program.graphs():
        for i, node in enumerate(graph.nodes):
            if node.target not in (aten.reshape.default, aten.view.default, aten.split_with_sizes.default):
                continue
            for k in range(len(node.args[1])):
                broken = program.clone()
                wrong = list(dict(broken.graphs())[name].nodes)[i]
                sizes = list(wrong.args[1])
                sizes[k] += 1
                wrong.args = (wrong.args[0], sizes, *wrong.args[2:])
                refused(broken)
                seen += 1
    assert seen > 10


def test_a_global_size_that_was_not_made_local_of():
    program = local_of()
    node = node_of(program, aten.linear.default)
    node.meta["spec"] = node.meta["global"]
    assert "linear" in refused(program)


def test_a_dtype():
    program = local_of()
    node = node_of(program, aten.layer_norm.default)
    node.meta["spec"] = replace(node.meta["spec"], dtype=torch.float64)
    assert "float64" in refused(program)


def test_one_of_several_results():
    program = local_of()
    node = node_of(program, aten.split_with_sizes.default)
    first, *rest = node.meta["spec"]
    node.meta["spec"] = (Spec((*first.shape[:-1], first.shape[-1] + 1), first.dtype), *rest)
    refused(program)
