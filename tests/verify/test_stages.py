"""Programs whose stages are broken in one way."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.errors import AutoparError
from autopar.ir.program import Program
from autopar.ir.stages import parts_of
from autopar.verify.stages import check_stages
from tests.passes.models import planned

PASSES = "data-parallel,tensor-parallel,reshard,pipeline{microbatches=4}"


def staged() -> Program:
    return planned("tied", "pp=2", PASSES).clone()


def backwards(program: Program) -> None:
    """The first node is in the last stage, its readers are not."""
    next(n for n in program.graph.nodes if "stage" in n.meta).meta["stage"] = 1


def unmarked(program: Program) -> None:
    del next(n for n in program.graph.nodes if "stage" in n.meta).meta["stage"]


def beyond(program: Program) -> None:
    for node in program.graph.nodes:
        if node.meta.get("stage") == 1:
            node.meta["stage"] = 2


def idle(program: Program) -> None:
    assert program.stages is not None
    program.stages = replace(program.stages, ranks=(0, 0))


def homeless(program: Program) -> None:
    name = parts_of(program)[1].params[0]
    program.params[name] = replace(program.params[name], stages=(0,))


@pytest.mark.parametrize(
    ("break_", "slug"),
    [
        (backwards, "stage-order"),
        (unmarked, "stage-order"),
        (beyond, "stage-order"),
        (idle, "stage-order"),
        (homeless, "stage-params"),
    ],
)
def test_broken_stages(break_: Callable[[Program], None], slug: str) -> None:
    program = staged()
    check_stages(program)
    break_(program)
    with pytest.raises(AutoparError) as error:
        check_stages(program, "pipeline")
    assert error.value.slug == slug and "after pass pipeline" in error.value.message


def test_what_crosses() -> None:
    """The residual alone: masks, positions and labels are made where they are read."""
    first, second = parts_of(staged())
    assert [v.spec.shape for v in first.sent] == [v.spec.shape for v in second.received] and len(first.sent) == 1
    assert set(first.params) & set(second.params) == {"embed.weight"}
