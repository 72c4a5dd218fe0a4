"""What a pipeline accepts and refuses, its defaults, its outputs and its random streams, on gloo processes."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from tests.pipeline.models import batch, model
from tests.pipeline.play import rows, same, trained
from tests.ranks import Ranks


def made(name: str, mesh: str, strategy: str) -> Any:
    return autopar.parallelize(model(name), mesh, kwargs=rows(batch(name), mesh), strategy=strategy)


def refused(name: str, mesh: str, strategy: str) -> None:
    made(name, mesh, strategy)


@pytest.mark.parametrize(
    ("mesh", "strategy", "slug", "words"),
    [
        ("pp=4", "virtual_stages=3,microbatches=4", "few-layers", ["12 stages", "7 layers", "layers.3"]),
        ("pp=4", "schedule=1f1b,microbatches=2", "schedule", ["at least as many microbatches", "2 for 4"]),
        ("pp=2", "schedule=dualpipev,microbatches=2", "schedule", ["2 for 4"]),
        ("pp=2", "schedule=sideways", "bad-strategy", ["sideways"]),
        ("pp=2", "schedule=1f1b,virtual_stages=2,microbatches=4", "schedule", ["exactly one"]),
        ("pp=2", "microbatches=3", "microbatch-rows", ["8 rows", "3 microbatches"]),
        ("pp=2", "stages=layers.9", "stage-names", ["layers.9"]),
        ("pp=2", "schedule=zbv,recompute=full,microbatches=4", "split-backward", ["zbv", "recompute=full"]),
        ("dp=2", "schedule=1f1b", "no-pipeline", ["dp=2"]),
        ("pp=2", "passes=data-parallel", "no-pipeline", ["pp=2"]),
    ],
)
def test_refusals(ranks: Ranks, mesh: str, strategy: str, slug: str, words: list[str]) -> None:
    world = 4 if mesh == "pp=4" else 2
    for error in ranks.refused(world, slug, refused, "tied", mesh, strategy):
        assert all(word in str(error) for word in words), error


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(self.one(x)).relu()).pow(2).mean()


def statistics(strategy: str) -> tuple[float, dict[str, Tensor | None], dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pm = autopar.parallelize(Statistics().double(), "pp=2", args=(x,), strategy=strategy)
    return float(pm.train_step(x)), pm.full_gradients(), {n: b.clone() for n, b in pm.named_buffers()}


def test_batch_statistics(ranks: Ranks) -> None:
    """They couple microbatches: refused where those are asked for, else the whole batch is one; buffers agree."""
    for error in ranks.refused(2, "batch-coupled-loss", statistics, "microbatches=2"):
        assert "microbatches=1" in str(error)
        assert re.match(r"norm \(test_calls.py:\d+ in forward: .*\): a value of it couples rows", error.message)
    torch.manual_seed(0)
    plain = Statistics().double()
    loss = plain(torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    loss.backward()
    for got in ranks.run(2, statistics, "default"):
        torch.testing.assert_close(got[0], float(loss.detach()))
        torch.testing.assert_close(got[1], {n: p.grad for n, p in plain.named_parameters()})
        torch.testing.assert_close(got[2], dict(plain.named_buffers()))


def defaults() -> list[str]:
    pm = made("tied", "pp=2", "default")
    return [line for line in pm.dump().splitlines() if "microbatches" in line]


def test_the_plan_says_what_it_chose(ranks: Ranks) -> None:
    note, title = ranks.run(2, defaults)[0]
    assert "8 microbatches: the most that divide 8 rows, up to 4 for each of 2 ranks" in note
    assert title.startswith("pipeline 1f1b, 2 stages on 2 ranks, 8 microbatches: ")


def named() -> list[str]:
    pm = made("tied", "pp=2", "stages=layers.1,microbatches=2")
    return [n for n, _ in pm.named_parameters()]


def test_stages_begin_where_the_user_says(ranks: Ranks) -> None:
    first, second = ranks.run(2, named)
    assert any("layers.0" in n for n in first) and not any("layers.1" in n for n in first)
    assert not any("layers.0" in n for n in second) and any("layers.3" in n for n in second)


def forwards(strategy: str) -> list[Any]:
    """Outputs in eval mode, without gradients in training mode, and what a call with gradients says."""
    pm = made("scores", "pp=2", strategy)
    given = rows(batch("scores"), "pp=2")
    with torch.no_grad():
        found = [pm(**given)]
    try:
        pm(**given)
    except AutoparError as error:
        found.append(error.slug)
    pm.eval()
    found.append(pm(**given))
    return found


def test_outputs_on_every_rank(ranks: Ranks) -> None:
    want = model("scores")(**batch("scores"))
    for got in ranks.run(2, forwards, "microbatches=4"):
        assert got[1] == "pipeline-forward"
        for out in (got[0], got[2]):
            torch.testing.assert_close(out, {n: t.detach() for n, t in want.items()})
            assert not out["loss"].requires_grad


def test_outputs_on_the_last_stage(ranks: Ranks) -> None:
    first, second = ranks.run(2, forwards, "microbatches=4,outputs=last")
    assert first == [None, "pipeline-forward", None]
    torch.testing.assert_close(second[2]["x"], model("scores")(**batch("scores"))["x"].detach())


def test_other_kinds_of_calls(ranks: Ranks) -> None:
    for error in ranks.refused(2, "input-gradient", inputs_with_gradients):
        assert "detach" in str(error)
    for error in ranks.refused(2, "split-backward", compiled):
        assert "1f1b" in str(error)


def inputs_with_gradients() -> None:
    pm = made("skips", "pp=2", "microbatches=2")
    pm.train_step(batch("skips")["x"].requires_grad_())


def compiled() -> None:
    pm = made("tied", "pp=2", "schedule=zbv,microbatches=4")
    pm.compile()
    pm.train_step(**batch("tied"))


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zbv"])
def test_dropout_is_that_of_the_same_strategy_without_stages(ranks: Ranks, schedule: str) -> None:
    want = ranks.run(1, trained, "noisy", "dp=1", "microbatches=4")[0]
    for got in ranks.run(2, trained, "noisy", "pp=2", f"microbatches=4,schedule={schedule}"):
        same(got, want)


def accumulated() -> dict[str, Tensor | None]:
    """Gradients of two steps, the first without a reduction over data ranks."""
    mesh = "pp=2,dp=2"
    pm = made("tied", mesh, "zero=1,microbatches=2")
    with pm.no_sync():
        pm.train_step(**rows(batch("tied", 1), mesh))
    pm.train_step(**rows(batch("tied", 2), mesh))
    pm.train_step(**rows(batch("tied", 3), mesh))
    return pm.full_gradients()


def test_steps_accumulate(ranks: Ranks) -> None:
    plain = model("tied")
    for seed in (1, 2, 3):
        plain(**batch("tied", seed)).backward()
    for got in ranks.run(4, accumulated):
        for name, p in plain.named_parameters():
            torch.testing.assert_close(got[name], p.grad)


def bits() -> Tensor:
    pm = made("tied", "pp=2", "microbatches=4")
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for step in range(3):
        pm.train_step(**batch("tied", step))
        pm.clip_grad_norm_(0.1)
        opt.step()
        opt.zero_grad()
    return dict(pm.named_parameters())["table.weight"].detach().clone()


def test_tied_weights_stay_equal_to_the_last_bit(ranks: Ranks) -> None:
    first, second = ranks.run(2, bits)
    assert torch.equal(first, second)
