"""Experts that are modules: which loops over them are one op, that the op computes what they do, and who holds what."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.evaluate import evaluate
from autopar.ir.layout import Shard
from autopar.ir.mesh import Mesh
from autopar.trace import trace
from autopar.trace.tracing import Traced
from tests.experts.lists import (
    Arrayed,
    Balanced,
    Cast,
    Counted,
    Dense,
    Dropout,
    Dropping,
    Hit,
    Normed,
    Repeated,
    Sorted,
    Unequal,
    Where,
)
from tests.experts.models import squared, states
from tests.ranks import Ranks

LOOPS = [Where, Hit, Sorted, Arrayed, Repeated, Normed, Counted, Dense]


def traced(model: nn.Module, mesh: str = "ep=2") -> Traced:
    return trace(model, (states(),), {}, mesh=Mesh.parse(mesh), rows=(2, 2), train=model.training)


def nodes(made: Traced) -> list[fx.Node]:
    return [n for _, g in made.program.graphs() for n in g.nodes if n.target is ops.experts]


@pytest.mark.parametrize("kind", LOOPS, ids=lambda k: k.__name__)
def test_loops_are_one_op(kind: Any) -> None:
    model = kind().eval()
    made = traced(model)
    assert len(nodes(made)) == 1 and "experts.3.up.weight" in made.program.params
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), **made.constants}
    with torch.no_grad():
        got, want = evaluate(made.program, values, [states()])[0], model(states())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_dense_loop_stays_a_loop_without_ep() -> None:
    assert not nodes(trace(Dense(), (states(),), {}, mesh=Mesh.parse("dp=1"), train=True))


@pytest.mark.parametrize("kind", [Dropping, Unequal])
def test_what_is_no_sum_over_choices_is_not_taken_for_one(kind: Any) -> None:
    with pytest.raises(AutoparError) as caught:
        traced(kind())
    assert caught.value.slug == "data-dependent-control-flow"


CASES = [
    (Where, "ep=4", ""), (Hit, "ep=2,tp=2", ""), (Sorted, "dp=2,ep=2", ""), (Dense, "dp=2,ep=2", "zero=3"),
    (Repeated, "tp=2", ""), (Normed, "ep=2,tp=2", ""), (Counted, "dp=2,ep=2", ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mesh", "strategy"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_equal(kind: Any, mesh: str, strategy: str) -> None:
    report = autopar.verify(kind(), mesh, (states(),), loss=squared, strategy=strategy)
    assert report.ok, report
    assert "grad.experts.3.down.bias" in report.errors


def test_each_expert_belongs_to_one_rank() -> None:
    from autopar.compile import lower

    program = lower(Where(), (states(2),), {}, Mesh.parse("ep=2"), loss=squared, after="reshard")
    owners = {}
    for name, param in program.params.items():
        kind = param.layout.get("ep") if param.layout else None
        owners[name] = kind.owner if isinstance(kind, Shard) else None
    assert {n: o for n, o in owners.items() if n.startswith("experts.")} == {
        n: int(n.split(".")[1]) // 2 for n in owners if n.startswith("experts.")
    }
    assert owners["router.weight"] is None


def trained(folder: str) -> tuple[int, dict[str, float]]:
    """Two steps of AdamW, saved and read again: elements of experts held, and the largest differences by name."""
    place, alone = dist.get_rank(), Hit()
    mine = states().tensor_split(4)[place]
    pm = autopar.parallelize(Hit(), "dp=2,ep=2", args=(mine,), loss=squared, strategy="zero=1")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, pm)]
    for _ in range(2):
        squared(alone(states())).backward()
        pm.train_step(mine)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pm.save(folder, optimizers[1])
    other = autopar.parallelize(Hit(), "ep=4", args=(mine,), loss=squared)
    other.load(folder)
    held = sum(p.to_local().numel() for n, p in other.named_parameters() if n.startswith("experts"))  # type: ignore[operator]
    want = dict(alone.named_parameters())
    return held, {n: float((p - want[n]).abs().max()) for n, p in other.full_parameters().items()}


def test_training_and_checkpoints(ranks: Ranks, tmp_path: Any) -> None:
    all_of_them = sum(p.numel() for p in Hit().experts.parameters())
    for held, errors in ranks.run(4, trained, str(tmp_path / "one"), timeout=300.0):
        assert held == all_of_them // 4
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("where", ["rows", "results", "weights"])
def test_casts_to_fewer_digits_are_the_model_s(where: str) -> None:
    """In float32: to leave one out would change the result by 1e-3."""
    model = Cast(where).eval()
    made = traced(model)
    assert len(nodes(made)) == 1
    values = {**dict(model.named_parameters()), **made.constants}
    with torch.no_grad():
        got, want = evaluate(made.program, values, [states()])[0], model(states())
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_products_that_are_rounded_before_they_are_added_are_no_sum() -> None:
    with pytest.raises(AutoparError, match="data-dependent-control-flow"):
        traced(Cast("products"))


@pytest.mark.parametrize("where", ["", "wide-results"])
def test_sums_are_as_wide_as_the_model_s(where: str) -> None:
    """Parameters and rows in bfloat16, results added up in float32: to add them up in bfloat16 would lose 2**-9."""
    model = Cast(where).eval().to(torch.bfloat16)
    x = states().to(torch.bfloat16)
    made = trace(model, (x,), {}, mesh=Mesh.parse("ep=2"), rows=(2, 2), train=False)
    assert len(nodes(made)) == 1
    with torch.no_grad():
        got, want = evaluate(made.program, dict(model.named_parameters()), [x])[0], model(x)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_dropout_inside_experts_is_refused_or_warned_of_by_name() -> None:
    """In train mode; the op for experts has no random numbers."""
    drawn = "no experts were recognized in .*: an expert draws random numbers"
    with pytest.raises(AutoparError, match="data-dependent-control-flow") as caught:
        traced(Dropout(False).train())
    assert "an expert draws random numbers" in str(caught.value)
    with pytest.raises(AutoparError, match=f"(?s){drawn}.*no-experts"):
        autopar.verify(Dropout(True).train(), "ep=2", (states(),), loss=squared)
    both = nn.Sequential(Dropout(True), Where()).train()
    report = autopar.verify(both, "ep=2", (states(),), loss=squared)
    assert report.ok and any("in 0: an expert draws random numbers" in n for n in report.notes), report
    assert autopar.verify(Dropout(False).eval(), "ep=2", (states(),), loss=squared).ok


def test_counts_of_choices_are_added_up() -> None:
    report = autopar.verify(Balanced(), "ep=2", (states(),), loss=squared, strategy="strict")
    assert report.ok, report
