"""Our conversions against ``spmd-types``: its own functions, and its checker on what ours compose."""

import pytest
import spmd_types as spmd
import torch
from torch import Tensor

from autopar.runtime import collectives as c
from autopar.runtime.axis import Axis
from autopar.runtime.simulate import run_ranks
from tests.runtime.oracle import TYPES, checking, group, stamp, typed
from tests.runtime.table import DUAL, ROWS, axis_of, held, sample


def theirs(src: str, dst: str, x: Tensor, axis: Axis) -> Tensor:
    a, b = (spmd.S(1) if k == "S" else TYPES[k] for k in (src, dst))
    if src == "P":
        call = spmd.reduce_scatter if dst == "S" else spmd.all_reduce
        return call(x.contiguous(), group(axis), dst=b, **({"scatter_dim": 1} if dst == "S" else {}))
    if src == "S" and dst in "IR":
        return spmd.all_gather(x, group(axis), src=a, dst=b, gather_dim=1)
    return spmd.convert(x, group(axis), src=a, dst=b, expert_mode=True)


@pytest.mark.filterwarnings("ignore:.*_functional_collectives.*is deprecated:FutureWarning")  # the package's own
@pytest.mark.parametrize("name", ROWS)
def test_equals_the_packages_own_conversion(name: str) -> None:
    row, owners = ROWS[name], held(None, 2)

    def rank(r: int) -> None:
        axis, results = axis_of(2), []
        for convert in (lambda x: row(x, 1, axis, None), lambda x: theirs(row.src, row.dst, x, axis)):
            x = sample(row.src, r, 1, owners, 1).requires_grad_()
            y = convert(x)
            y.backward(sample(DUAL[row.dst], r, 1, owners, 2).contiguous())
            results.append((y.detach(), x.grad))
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other)

    run_ranks(2, rank)


CONVERSIONS = ("to_replicated", "all_reduce_invariant", "all_reduce_invariant of the loss")


def mlp(axes: dict[str, Axis], without: str | None) -> Tensor:
    """A column and row parallel pair on rows sharded over dp, with a loss that is partial over dp."""

    def convert(name: str, x: Tensor, axis: Axis) -> Tensor:
        return x if name == without else typed(getattr(c, name.split()[0]))(x, axis)

    x = stamp(torch.randn(2, 8, requires_grad=True), axes, dp="S", tp="I")
    up = stamp(torch.randn(4, 8, requires_grad=True), axes, dp="R", tp="S")
    down = stamp(torch.randn(8, 4, requires_grad=True), axes, dp="R", tp="S")
    hidden = torch.nn.functional.silu(convert("to_replicated", x, axes["tp"]) @ up.t())
    partial = spmd.reinterpret(hidden @ down.t(), group(axes["tp"]), src=spmd.V, dst=spmd.P)
    out = convert("all_reduce_invariant", partial, axes["tp"])
    loss = spmd.reinterpret(torch.sin(out).sum(), group(axes["dp"]), src=spmd.V, dst=spmd.P)
    return torch.sqrt(convert("all_reduce_invariant of the loss", loss, axes["dp"]))


def test_checker_accepts_the_composition() -> None:
    with checking("dp=2,tp=2") as axes:
        spmd.assert_type(mlp(axes, None), {group(axes["dp"]): spmd.I, group(axes["tp"]): spmd.I})


@pytest.mark.parametrize("without", CONVERSIONS)
def test_checker_misses_no_deleted_conversion(without: str) -> None:
    with checking("dp=2,tp=2") as axes, pytest.raises(spmd.SpmdTypeError):
        mlp(axes, without)
