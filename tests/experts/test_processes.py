"""Experts on real gloo processes: training, bytes on the wire, idle ranks, what is counted."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

import autopar
from tests.experts.models import EXPERTS, Moe, batch, collapsed, deepseek, squared, states
from tests.ranks import Ranks

RANKS = 4


class Balanced(DeepseekV3MoE):
    """Moves the routers' bias towards the experts with few tokens, without gradients."""

    def route_tokens_to_experts(self, router_logits: Tensor) -> Any:
        chosen, weights = super().route_tokens_to_experts(router_logits)
        if self.training:
            with torch.no_grad():
                load = F.one_hot(chosen, EXPERTS).sum((0, 1)).float()
                self.gate.e_score_correction_bias += 0.01 * torch.sign(load.mean() - load)
        return chosen, weights


def balanced() -> nn.Module:
    """A DeepSeek-V3 whose correction bias is updated in the forward."""
    model = deepseek()
    for module in model.modules():
        if type(module) is DeepseekV3MoE:
            module.__class__ = Balanced
    return model.train()


def rows(x: Any, ways: int = RANKS) -> Any:
    """This data rank's rows; model ranks are minor."""
    place = dist.get_rank() * ways // dist.get_world_size()
    return (
        {k: v.tensor_split(ways)[place] for k, v in x.items()} if isinstance(x, dict) else x.tensor_split(ways)[place]
    )


def trained(mesh: str, ways: int, strategy: str) -> dict[str, float]:
    """The largest difference of each tensor from the unsharded model after three steps of AdamW."""
    alone, given = balanced(), batch()
    pm = autopar.parallelize(copy.deepcopy(alone), mesh, kwargs=rows(given, ways), strategy=strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (alone, pm)]
    for _ in range(3):
        alone(**given, use_cache=False).loss.backward()
        pm.train_step(**rows(given, ways))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    have = {**pm.full_parameters(), **dict(pm.named_buffers())}
    want = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    return {n: float((have[n] - want[n]).abs().max()) for n in want}


@pytest.mark.parametrize(("mesh", "ways", "strategy"), [("ep=4", 4, ""), ("dp=2,ep=2", 4, "zero=3")])
def test_training(ranks: Ranks, mesh: str, ways: int, strategy: str) -> None:
    for errors in ranks.run(RANKS, trained, mesh, ways, strategy, timeout=180.0):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda x: x[1])
        assert any("correction_bias" in n for n in errors)


def step(strategy: str, chosen: tuple[int, ...]) -> dict[str, float]:
    """The largest difference of each gradient where every token chooses the same experts."""
    alone, x = collapsed(chosen), states()
    squared(alone(x)).backward()
    pm = autopar.parallelize(alone, "ep=4", args=(rows(x),), loss=squared, strategy=strategy)
    for _ in range(2):
        pm.zero_grad()
        pm.train_step(rows(x))
    assert all(p.grad is not None for p in pm.parameters())
    want = {n: p.grad for n, p in alone.named_parameters()}
    return {n: float((g - want[n]).abs().max()) for n, g in pm.full_gradients().items() if g is not None}  # type: ignore[operator]


@pytest.mark.parametrize("strategy", ["", "zero=3", "expert_capacity=4"])
def test_idle_ranks_and_experts_get_zero_gradients(ranks: Ranks, strategy: str) -> None:
    for chosen in ((0,), (1, 2)):
        for errors in ranks.run(RANKS, step, strategy, chosen, timeout=120.0):
            assert max(errors.values()) < 1e-5 and len(errors) == 6, errors


def saved(folder: str) -> float:
    """A checkpoint of ep=4 read on dp=2,ep=2: the largest difference of a parameter."""
    alone, x = Moe(), states()
    pm = autopar.parallelize(alone, "ep=4", args=(rows(x),), loss=squared)
    pm.save(folder)
    other = autopar.parallelize(Moe(), "dp=2,ep=2", args=(rows(x),), loss=squared, strategy="zero=3")
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load(folder)
    want = dict(alone.named_parameters())
    return max(float((p - want[n]).abs().max()) for n, p in other.full_parameters().items())


def test_checkpoints_go_from_mesh_to_mesh(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks.run(RANKS, saved, str(tmp_path / "one")) == [0.0] * RANKS


def compiled(strategy: str) -> float:
    """The largest difference of a gradient in compiled code."""
    alone, x = Moe().eval(), states()
    squared(alone(x)).backward()
    pm = autopar.parallelize(alone, "ep=4", args=(rows(x),), loss=squared, strategy=strategy)
    pm.compile(backend="aot_eager")
    pm.train_step(rows(x))
    want = {n: p.grad for n, p in alone.named_parameters()}
    return max(float((g - want[n]).abs().max()) for n, g in pm.full_gradients().items())  # type: ignore[operator]


def test_compiled_with_static_shapes(ranks: Ranks) -> None:
    assert max(ranks.run(RANKS, compiled, "expert_capacity=4", timeout=120.0)) < 1e-5


def test_shapes_that_depend_on_values_are_not_compiled(ranks: Ranks) -> None:
    ranks.refused(RANKS, "compile-experts", compiled, "")


def without_rows(strategy: str, chosen: tuple[int, ...] | None) -> tuple[int, dict[str, float]]:
    """The rows of a rank where there are fewer than ranks, and the largest difference of each gradient and buffer."""
    alone, x = collapsed(chosen) if chosen else Moe().train(), states(RANKS - 1)
    pm = autopar.parallelize(copy.deepcopy(alone), "ep=4", args=(rows(x),), loss=squared, strategy=strategy)
    for _ in range(2):
        alone.zero_grad()
        squared(alone(x)).backward()
        pm.zero_grad()
        pm.train_step(rows(x))
    want = {**{n: p.grad for n, p in alone.named_parameters()}, **dict(alone.named_buffers())}
    have = {**pm.full_gradients(), **dict(pm.named_buffers())}
    return len(rows(x)), {n: float((have[n] - want[n]).abs().max()) for n in want}  # type: ignore[operator]


@pytest.mark.parametrize("strategy", ["", "zero=3", "expert_capacity=4"])
@pytest.mark.parametrize("chosen", [None, (0,)], ids=["spread", "one"])
def test_a_rank_without_tokens(ranks: Ranks, strategy: str, chosen: tuple[int, ...] | None) -> None:
    answers = ranks.run(RANKS, without_rows, strategy, chosen, timeout=120.0)
    assert [n for n, _ in answers] == [1, 1, 1, 0]
    for _, errors in answers:
        assert max(errors.values()) < 1e-5 and len(errors) == 7, errors
