"""All ranks in one process, in double precision, against the unsharded model."""

import pytest

import autopar
from autopar.errors import AutoparError
from autopar.ir.layout import Shard
from tests.experts.models import EXPERTS, Experts, Moe, batch, collapsed, deepseek, gpt_oss, qwen, squared, states

CASES = [
    (deepseek, "dp=2,ep=2"), (deepseek, "ep=2,tp=2"), (qwen, "ep=4"), (qwen, "tp=2"), (gpt_oss, "ep=2,tp=2"),
    (gpt_oss, "tp=2"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "mesh"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_equal(make, mesh: str) -> None:
    report = autopar.verify(make(), mesh, (), batch())
    assert report.ok, report


@pytest.mark.parametrize("strategy", ["zero=1", "zero=3", "recompute=full", "sequence_parallel"])
def test_strategies(strategy: str) -> None:
    mesh = "ep=2,tp=2" if strategy == "sequence_parallel" else "dp=2,ep=2"
    report = autopar.verify(deepseek(), mesh, (), batch(), strategy=strategy)
    assert report.ok, report


@pytest.mark.parametrize("chosen", [(0,), (0, 1)], ids=["one", "two"])
@pytest.mark.parametrize("mesh", ["ep=2", "ep=4", "dp=2,ep=2"])
def test_idle_experts_and_ranks(mesh: str, chosen: tuple[int, ...]) -> None:
    report = autopar.verify(collapsed(chosen), mesh, (states(),), loss=squared)
    assert report.ok, report
    assert all(f"grad.experts.{n}" in report.errors for n in ("up", "scale", "down"))


def test_rows_may_be_uneven() -> None:
    report = autopar.verify(Moe().eval(), "ep=4", (states(7),), loss=squared)
    assert report.ok, report


def test_a_bias_updated_without_gradients_is_global() -> None:
    report = autopar.verify(Moe().train(), "dp=2,ep=2", (states(),), loss=squared)
    assert report.ok and "buffer.bias" in report.errors, report


def test_experts_are_shared_out_and_nothing_else() -> None:
    from autopar.compile import lower
    from autopar.ir.mesh import Mesh

    program = lower(Moe().eval(), (states(),), {}, Mesh.parse("dp=2,ep=2"), loss=squared, after="zero")
    cut = {n for n, p in program.params.items() if p.layout and isinstance(p.layout.get("ep"), Shard)}
    assert cut == {"experts.up", "experts.scale", "experts.down"}


def test_a_number_of_experts_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AutoparError) as caught:
        autopar.verify(Moe(Experts(EXPERTS)).eval(), "ep=3", (states(6),), loss=squared)
    assert caught.value.slug == "indivisible-dim"
    assert "4 experts" in str(caught.value) and "ep in 1, 2, 4" in str(caught.value)


def test_a_model_without_experts_is_refused() -> None:
    from torch import nn

    with pytest.raises(AutoparError) as caught:
        autopar.verify(nn.Linear(16, 16), "ep=2", (states(),), loss=squared)
    assert caught.value.slug == "no-experts"
