import sys

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime import collectives as c
from autopar.runtime.simulate import run_ranks
from tests.runtime.table import axis_of


def total(world: int) -> list[float]:
    return run_ranks(world, lambda r: c.all_reduce(torch.tensor(float(r + 1)), axis_of(world)).item())


def test_runs_again_and_again() -> None:
    hook = sys.excepthook
    assert [total(world) for world in (1, 3, 2, 3)] == [[1.0], [6.0] * 3, [3.0] * 2, [6.0] * 3]
    assert sys.excepthook is hook
    assert not dist.is_initialized()


@pytest.mark.parametrize("where", ["before", "while grouping", "after"])
def test_first_error_stops_all_and_is_raised(where: str) -> None:
    def rank(r: int) -> None:
        if r == 1 and where == "before":
            raise ValueError("mine")
        if r == 1 and where == "while grouping":
            dist.new_group([0])
            raise ValueError("mine")
        axis = axis_of(3)
        if r == 1:
            raise ValueError("mine")
        c.all_reduce(torch.ones(1), axis)

    with pytest.raises(ValueError, match="mine") as error:
        run_ranks(3, rank, timeout=60.0)
    assert error.value.__notes__ == ["on rank 1"]
    assert total(2) == [3.0, 3.0]


def test_missing_collective_is_an_error_not_a_hang() -> None:
    def rank(r: int) -> None:
        axis = axis_of(3)
        if r != 2:
            c.all_reduce(torch.ones(1), axis)

    with pytest.raises(AutoparError) as error:
        run_ranks(3, rank, timeout=60.0)
    assert error.value.slug == "rank-deadlock"
    assert "[0, 1]" in error.value.message
    assert total(2) == [3.0, 3.0]


def test_timeout() -> None:
    def rank(r: int) -> None:
        while r == 1 and not dist.distributed_c10d._world.default_pg._terminate.is_set():
            torch.ones(1).add(1)

    with pytest.raises(AutoparError) as error:
        run_ranks(2, rank, timeout=0.3)
    assert error.value.slug == "rank-timeout"


def test_grad_modes_are_the_callers() -> None:
    def modes(_: int) -> tuple[bool, bool, torch.dtype]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.ones(1).dtype

    assert run_ranks(1, modes) == [(True, False, torch.float32)]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            assert run_ranks(1, modes) == [(False, False, torch.float64)]
        with torch.inference_mode():
            assert run_ranks(1, modes) == [(False, True, torch.float64)]
    finally:
        torch.set_default_dtype(torch.float32)
