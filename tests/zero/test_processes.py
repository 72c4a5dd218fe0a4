"""ZeRO on real gloo processes: what is on the wire, bf16, dropout under recomputation, compiled code."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import autopar
from tests.llama import llama
from tests.ranks import Ranks
from tests.zero.models import Wire, ids

RANKS = 4


def mine(x: Tensor, ways: int = RANKS) -> dict[str, Tensor]:
    """This data rank's rows as a call of the model; model ranks are minor."""
    rows = x.tensor_split(ways)[dist.get_rank() * ways // dist.get_world_size()]
    return {"input_ids": rows, "labels": rows.clone()}


def sent(strategy: str) -> dict[str, Any]:
    """Bytes of a second training step, and the engine's."""
    batch = mine(ids())
    pm = autopar.parallelize(llama(), f"dp={RANKS}", kwargs=batch, strategy=strategy)
    pm.train_step(**batch)
    with Wire() as wire:
        pm.train_step(**batch)
    engine = pm._compiler.variants.popitem()[1].program.engine  # type: ignore[attr-defined]
    sizes = {g.unit: 4 * g.elements for g in engine.groups} if engine else {}
    return {"bytes": dict(wire.bytes), "calls": dict(wire.calls), "sizes": sizes}


MODEL = 4 * sum(p.numel() for p in llama().parameters())
OUTER = 4 * sum(p.numel() for n, p in llama().named_parameters() if "layers" not in n)
SHARE = (RANKS - 1) / RANKS


@pytest.mark.parametrize("microbatches", [1, 2])
def test_bytes_on_the_wire(ranks: Ranks, microbatches: int) -> None:
    m = microbatches
    for stage in (0, 1, 2, 3):
        strategy = f"zero={stage},microbatches={m}" if stage else f"microbatches={m}"
        for got in ranks.run(RANKS, sent, strategy, timeout=120.0):
            wanted = {
                0: {"all_reduce": 2 * MODEL * SHARE},
                1: {"all_gather": MODEL * SHARE, "reduce_scatter": MODEL * SHARE},
                2: {"all_gather": MODEL * SHARE, "reduce_scatter": m * MODEL * SHARE},
                3: {"all_gather": m * (2 * MODEL - OUTER) * SHARE, "reduce_scatter": m * MODEL * SHARE},
            }[stage]
            assert got["bytes"] == wanted, (stage, got)
            assert not stage or sum(got["sizes"].values()) == MODEL


def test_copies_reduce_their_shards_alone(ranks: Ranks) -> None:
    half = MODEL / 2
    for got in ranks.run(RANKS, sent, "zero=2,zero_shard_size=2", timeout=120.0):
        assert got["bytes"] == {"all_gather": half, "reduce_scatter": half, "all_reduce": half}


def trained(mesh: str, strategy: str, model: dict[str, Any], compiled: bool = False, steps: int = 3) -> Any:
    """Losses and whole parameters after AdamW on this mesh."""
    ways = autopar.ir.mesh.Mesh.parse(mesh).data_size
    batch = mine(ids(), ways)
    pm = autopar.parallelize(llama(**model), mesh, kwargs=batch, strategy=strategy).train()
    if compiled:
        pm.compile(backend="aot_eager")
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        losses.append(float(pm.train_step(**mine(ids(seed=step), ways))))
        pm.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    dtypes = {p.dtype for p in pm.parameters()} | {s["exp_avg"].dtype for s in opt.state.values()}
    return losses, pm.full_parameters(), dtypes


def reference(steps: int = 3, lower: torch.dtype | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """The unsharded model, computing in ``lower`` from fp32 parameters where given."""
    model = llama()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = ids(seed=step)
        given = {n: p.to(lower or p.dtype) for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, given, kwargs={"input_ids": x, "labels": x}).loss
        losses.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    return losses, {n: p.detach() for n, p in copy.copy(model).named_parameters()}


def near(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float, atol: float) -> None:
    assert got.keys() == want.keys()
    for name, w in want.items():
        torch.testing.assert_close(got[name], w, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("strategy", ["zero=1", "zero=2,microbatches=2", "zero=3,recompute=full", "zero=3,prefetch=1"])
def test_training_equals_the_model(ranks: Ranks, mesh: str, strategy: str) -> None:
    losses, params = reference()
    for got, whole, _ in ranks.run(RANKS, trained, mesh, strategy, {}, timeout=120.0):
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-6)
        near(whole, params, 1e-3, 2e-4)


@pytest.mark.parametrize("strategy", ["", "zero=1,microbatches=2", "zero=3", "zero=3,recompute=selective"])
def test_bf16_computes_low_and_keeps_fp32(ranks: Ranks, strategy: str) -> None:
    """Under AdamW, whose steps tell the signs of small gradients; tests/zero/test_precision.py bounds each tensor."""
    losses, params = reference(lower=torch.bfloat16)
    exact, _ = reference()
    given = ",".join(filter(None, (strategy, "precision=bf16")))
    found = [r for mesh in ("dp=4", "dp=2,tp=2") for r in ranks.run(RANKS, trained, mesh, given, {}, timeout=120.0)]
    for got, _, dtypes in found:
        assert dtypes == {torch.float32}
        torch.testing.assert_close(got, losses, rtol=5e-3, atol=5e-3)
        assert abs(got[0] - exact[0]) > 1e-6  # the first loss is that of other weights than the fp32 ones


def test_bf16_on_one_rank_is_the_model_with_bf16_copies() -> None:
    losses, params = reference(lower=torch.bfloat16)
    x = ids()
    pm = autopar.parallelize(llama(), "dp=1", kwargs={"input_ids": x, "labels": x.clone()}, strategy="precision=bf16")
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for step in range(3):
        x = ids(seed=step)
        assert float(pm.train_step(input_ids=x, labels=x.clone())) == pytest.approx(losses[step], rel=1e-3)
        pm.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        assert pm(input_ids=x, labels=x.clone()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_dropout_draws_the_same_masks(ranks: Ranks, policy: str, compiled: bool) -> None:
    """Losses and parameters are those without recomputation, dropout included, compiled or not."""
    given = {"attention_dropout": 0.3}
    want = ranks.run(RANKS, trained, "dp=2,tp=2", "zero=3", given, timeout=120.0)
    got = ranks.run(RANKS, trained, "dp=2,tp=2", f"zero=3,recompute={policy}", given, compiled, timeout=200.0)
    for (losses, params, _), (found, whole, _) in zip(want, got):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
        near(whole, params, 1e-3, 2e-4)


def held() -> Any:
    batch = mine(ids())
    pm = autopar.parallelize(llama(), "dp=4", kwargs=batch, strategy="zero=3")
    return {n: (type(p) is DTensor, p.to_local().numel(), p.numel()) for n, p in pm.named_parameters()}  # type: ignore[attr-defined]


def test_each_rank_holds_a_quarter(ranks: Ranks) -> None:
    for found in ranks.run(RANKS, held):
        assert all(own * RANKS == whole for _, own, whole in found.values()), found
