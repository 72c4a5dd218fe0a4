"""bf16 with fp32 masters: gradients and updates against the model run eagerly in the same mixed precision.

Rounding has another order on every mesh, so two right results differ about as much as each differs from fp32. The
bound is therefore the eager run's own error against fp32, tensor by tensor, times a small factor.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from tests.llama import llama
from tests.ranks import Ranks
from tests.zero.models import ids
from tests.zero.test_processes import RANKS, mine

STEPS = 3
AS_FAR, APART = 1.5, 2.0  # from fp32, and from the eager run, in errors of the eager run
EPSILON = torch.finfo(torch.bfloat16).eps / 2
Tensors = dict[str, Tensor]


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Linear in the gradients, so that errors stay in proportion; AdamW turns those of small ones into whole steps."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def eager(lower: torch.dtype | None) -> tuple[list[float], Tensors, Tensors]:
    """Losses, gradients of the first step, and how far the parameters went in all, computing in ``lower``."""
    model = llama()
    optimizer, losses, grads = momentum(model.parameters()), [], {}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(STEPS):
        x = ids(seed=step)
        given = {n: p.to(lower or p.dtype) for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, given, kwargs={"input_ids": x, "labels": x}).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        grads = grads or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads, {n: p.detach() - before[n] for n, p in model.named_parameters()}


def emitted(mesh: str, strategy: str) -> tuple[list[float], Tensors, Tensors, set[torch.dtype]]:
    """The same on the mesh. The first update is checked against one in fp32 on the whole tensors."""
    ways = Mesh.parse(mesh).data_size
    rows = (
        (lambda x: mine(x, ways)) if Mesh.parse(mesh).world > 1 else (lambda x: {"input_ids": x, "labels": x.clone()})
    )
    pm = autopar.parallelize(llama(), mesh, kwargs=rows(ids()), strategy=strategy)
    optimizer, losses, grads = momentum(pm.parameters()), [], {}
    before = {n: p.detach().clone() for n, p in pm.full_parameters().items()}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(pm.train_step(**rows(ids(seed=step)))))
        if step == 0:
            grads = {n: g.clone() for n, g in pm.full_gradients().items() if g is not None}
        optimizer.step()
        if step == 0:
            updated_in_fp32(before, grads, pm.full_parameters())
    dtypes = {p.dtype for p in pm.parameters()} | {s["momentum_buffer"].dtype for s in optimizer.state.values()}
    dtypes |= {p.grad.dtype for p in pm.parameters() if p.grad is not None}
    return losses, grads, {n: p.detach() - before[n] for n, p in pm.full_parameters().items()}, dtypes


def updated_in_fp32(before: Tensors, grads: Tensors, after: Tensors) -> None:
    """Masters that were rounded to bf16 anywhere would be off by 1e-3 of their size."""
    for name, start in before.items():
        param = nn.Parameter(start.clone())
        param.grad = grads[name]
        momentum([param]).step()
        torch.testing.assert_close(after[name], param.detach(), rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def within(got: Tensors, low: Tensors, exact: Tensors) -> None:
    """No further from fp32 than the eager run is, and near to it, by the norm of each tensor."""
    assert got.keys() == low.keys() == exact.keys()
    for name in exact:
        error = float((low[name] - exact[name]).norm())
        assert 0 < error < 0.2 * float(exact[name].norm()), name  # so that the bound says something
        off, apart = (float((got[name] - x[name]).norm()) / error for x in (exact, low))
        assert off < AS_FAR and apart < APART, (name, off, apart)


def compare(found: Any) -> None:
    losses, grads, moved, dtypes = found
    low, exact = eager(torch.bfloat16), eager(None)
    assert dtypes == {torch.float32}
    assert losses == pytest.approx(low[0], rel=EPSILON)
    within(grads, low[1], exact[1])
    within(moved, low[2], exact[2])


@pytest.mark.parametrize("strategy", ["", "zero=1,microbatches=2", "zero=2", "zero=3,recompute=selective"])
def test_on_meshes(ranks: Ranks, strategy: str) -> None:
    given = ",".join(filter(None, (strategy, "precision=bf16")))
    for mesh in ("dp=4", "dp=2,tp=2"):
        compare(ranks.run(RANKS, emitted, mesh, given, timeout=180.0)[0])


def test_one_rank_does_what_the_eager_model_does() -> None:
    low, found = eager(torch.bfloat16), emitted("dp=1", "precision=bf16")
    assert found[0] == pytest.approx(low[0], rel=1e-6)
    for got, want in ((found[1], low[1]), (found[2], low[2])):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_the_output_is_low() -> None:
    x = {"input_ids": ids(), "labels": ids().clone()}
    pm = autopar.parallelize(llama(), "dp=1", kwargs=x, strategy="precision=bf16")
    with torch.no_grad():
        assert pm(**x).logits.dtype == torch.bfloat16
