"""Reductions and softmaxes over a dim that ranks share out, in every dtype; and what they send."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime import along
from autopar.runtime.axis import Axis
from autopar.runtime.simulate import run_ranks
from tests.runtime.table import Issued, axis_of

RUNS = (((0, 2), (9, 3)), ((2, 7),))  # of two ranks, in local order
TOTAL = 12
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "first": lambda x: x.max(1).values,
    "last": lambda x: x.min(1).values,
    "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
}


def parts(axes: tuple[Axis, ...], at: int) -> dict[str, Callable[[Tensor], Any]]:
    return {
        "max": lambda x: along.extreme(x, (1,), False, "max", axes),
        "min": lambda x: along.extreme(x, (1,), False, "min", axes),
        "first": lambda x: along.extreme_at(x, 1, False, "max", axes, RUNS[at], TOTAL)[0],
        "last": lambda x: along.extreme_at(x, 1, False, "min", axes, RUNS[at], TOTAL)[0],
        "logsumexp": lambda x: along.logsumexp(x, (1,), False, axes),
        "softmax": lambda x: along.softmax(x, 1, axes),
        "log_softmax": lambda x: along.log_softmax(x, 1, axes),
    }


def held(x: Tensor, at: int) -> Tensor:
    return torch.cat([x[:, s : s + n] for s, n in RUNS[at]], 1) if x.dim() > 1 else x


def values(dtype: torch.dtype) -> Tensor:
    """Many are equal; one row has NaN on one rank, then on the other, one infinities, one nothing else."""
    x = torch.randint(-2, 3, (6, TOTAL), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_floating_point:
        x[0] = torch.randn(TOTAL, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
        x[1, 10], x[2, 4], x[3, 0], x[4, 1:] = torch.nan, torch.nan, torch.inf, -torch.inf
        x[5] = -torch.inf
    return x


def same(axis: Axis) -> None:
    """What this rank of two gets is its part of torch's results and gradients."""
    at = axis.coordinate
    for dtype in FLOATS:
        for name, part in parts((axis,), at).items():
            whole, mine = values(dtype).requires_grad_(), held(values(dtype), at).requires_grad_()
            want, got = WHOLE[name](whole), part(mine)
            grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
            want.backward(grad)
            soft = want.shape == whole.shape
            got.backward(held(grad, at) if soft else grad)
            size = torch.finfo(dtype).eps
            close = {"rtol": 4 * size, "atol": 8 * size, "equal_nan": True}
            torch.testing.assert_close(
                got, held(want, at) if soft else want, msg=lambda m, n=name: f"{n}: {m}", **close
            )
            torch.testing.assert_close(mine.grad, held(whole.grad, at), msg=lambda m, n=name: f"{n}: {m}", **close)
    for dtype in (*FLOATS, torch.int64, torch.int16, torch.uint8, torch.bool):
        x = values(torch.int16).abs().to(dtype) if dtype in (torch.uint8, torch.bool) else values(dtype)
        for way, best in (("max", x.max(1)), ("min", x.min(1))):
            got = along.extreme_at(held(x, at), 1, False, way, (axis,), RUNS[at], TOTAL)
            torch.testing.assert_close(got[1], best.indices)
            for value in (got[0], along.extreme(held(x, at), (1,), False, way, (axis,))):
                torch.testing.assert_close(value, best.values, rtol=0, atol=0, equal_nan=True)


def test_results_and_gradients_are_torch_s() -> None:
    run_ranks(2, lambda r: same(axis_of(2)))


@pytest.mark.parametrize("name", WHOLE)
def test_only_what_is_left_of_the_dim_is_sent(name: str) -> None:
    def rank(r: int) -> tuple[list[str], list[int]]:
        x = torch.randn(6, len(held(torch.empty(1, TOTAL), r)[0])).requires_grad_()
        with Issued() as issued:
            out = parts((axis_of(2),), r)[name](x)
            out.backward(torch.randn_like(out))
        return issued.names, issued.sizes

    messages = 3 if "softmax" in name else 2  # the third is of gradients
    assert run_ranks(2, rank) == [(["all_reduce"] * messages, [6] * messages)] * 2
