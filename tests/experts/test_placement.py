"""Experts placed by load: what the planner chooses, and that nothing but the load of ranks changes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import AutoparError, Placement
from autopar.runtime.load import ExpertLoad
from tests.experts import lists
from tests.experts.models import Moe, batch, collapsed, deepseek, squared, states
from tests.experts.test_processes import balanced, rows
from tests.ranks import Ranks

LAYER = "model.layers.1.mlp.experts"
MOVED = Placement(((3,), (1,), (0,), (2,)))
COPIED = Placement(((3,), (1,), (0,), (2,)), ((0, 1), (), (1,), (0,)))
HALVES = Placement(((3, 0), (1, 2)), ((1,), (0, 3)))


def load(*tokens: int, ranks: int = 4) -> dict[str, ExpertLoad]:
    """The load of one layer."""
    counts = torch.tensor(tokens)
    return {"moe": ExpertLoad(counts, counts.view(ranks, -1).sum(1))}


def test_homes_alone() -> None:
    found = autopar.place_experts(load(8, 7, 6, 5, 4, 3, 2, 1))["moe"]
    assert {frozenset(h) for h in found.homes} == {frozenset(p) for p in ((0, 7), (1, 6), (2, 5), (3, 4))}
    assert not found.room and found.moved


def test_a_hot_expert_is_copied() -> None:
    found = autopar.place_experts(load(12, 0, 0, 0), copies=1)["moe"]
    assert found.imbalance([12, 0, 0, 0]) == 1.0
    assert sum(0 in c for c in found.copies) == 3


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("move", [True, False])
def test_any_load(copies: int, move: bool) -> None:
    draw = torch.Generator().manual_seed(copies)
    for _ in range(50):
        tokens = (torch.rand(16, generator=draw) ** 4 * 1000).long().tolist()
        found = autopar.place_experts(load(*tokens), copies=copies, move=move)["moe"]
        assert found == autopar.place_experts(load(*tokens), copies=copies, move=move)["moe"]
        assert max(map(len, found.copies)) <= copies and (move or not found.moved)
        assert sorted(s for h in found.holders() for s in h) == [
            i for i, e in enumerate(e for row in found.slots for e in row) if e >= 0
        ]
        plain = Placement(tuple(tuple(range(r * 4, r * 4 + 4)) for r in range(4)))
        assert found.imbalance(tokens) <= plain.imbalance(tokens)


@pytest.mark.parametrize(
    "wrong",
    [((0, 1), (1, 2)), ((0, 1, 2), (3,)), ((0, 1), (2, 4))],
)
def test_homes_have_each_expert_once(wrong: Any) -> None:
    with pytest.raises(AutoparError, match="bad-placement"):
        Placement(wrong)


@pytest.mark.parametrize("wrong", [((0,), ()), ((2, 2), ()), ((7,), ()), ((2,),)])
def test_copies_are_of_other_ranks(wrong: Any) -> None:
    with pytest.raises(AutoparError, match="bad-placement"):
        Placement(((0, 1), (2, 3)), wrong)


CASES = [("ep=4", MOVED, ""), ("ep=4", COPIED, ""), ("ep=2", HALVES, ""), ("dp=2,ep=2", HALVES, "zero=3"),
         ("ep=2,tp=2", HALVES, ""), ("ep=2", HALVES, "recompute=full"), ("ep=2", HALVES, "microbatches=2"),
         ("ep=2,pp=2", HALVES, "schedule=zero-bubble,microbatches=2")]  # fmt: skip


@pytest.mark.parametrize(("mesh", "placement", "strategy"), CASES)
def test_equal_to_the_unsharded_model(mesh: str, placement: Placement, strategy: str) -> None:
    report = autopar.verify(deepseek(), mesh, (), batch(), strategy=strategy, placement={LAYER: placement})
    assert report.ok, report


def test_rows_that_are_idle_and_uneven() -> None:
    for chosen in ((0,), (1, 3)):
        report = autopar.verify(collapsed(chosen), "ep=4", (states(3),), loss=squared, placement={"experts": COPIED})
        assert report.ok, report


def test_copies_of_experts_that_are_modules() -> None:
    model, given, ways = lists.Where().eval(), (states(),), lists.EXPERTS // 2
    homes = tuple(range(ways)), tuple(range(ways, 2 * ways))
    copied = Placement(homes, (homes[1][:1], homes[0][1:]))
    report = autopar.verify(model, "ep=2", given, loss=squared, placement={"": copied})
    assert report.ok, report
    with pytest.raises(AutoparError, match="bad-placement.*|copies alone"):
        autopar.verify(model, "ep=2", given, loss=squared, placement={"": Placement(homes[::-1])})


def trained(mesh: str, ways: int, strategy: str, placement: Placement) -> tuple[dict[str, float], list[str], Any]:
    """The largest difference of each tensor from the unsharded model after three steps of AdamW; names; the load."""
    alone, given = balanced(), batch()
    pm = autopar.parallelize(
        copy.deepcopy(alone), mesh, kwargs=rows(given, ways), strategy=strategy, placement={LAYER: placement}
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (alone, pm)]
    for _ in range(3):
        alone(**given, use_cache=False).loss.backward()
        pm.train_step(**rows(given, ways))
        norms = nn.utils.clip_grad_norm_(alone.parameters(), 0.5), pm.clip_grad_norm_(0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    have = {**pm.full_parameters(), **dict(pm.named_buffers())}
    want = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    errors = {n: float((have[n] - want[n]).abs().max()) for n in want}
    ((path, busy),) = pm.expert_load().items()
    assert list(pm.state_dict()) == list(alone.state_dict()) and path == LAYER
    return {**errors, "norm": abs(float(norms[0] - norms[1]))}, busy.tokens.tolist(), busy.ranks.tolist()


@pytest.mark.parametrize(
    ("mesh", "ways", "strategy", "placement"),
    [
        ("ep=2", 2, "", HALVES),
        ("ep=4", 4, "", MOVED),
        ("ep=4", 4, "zero=3", COPIED),
        ("dp=2,ep=2", 4, "zero=3", HALVES),
    ],
)
def test_training(ranks: Ranks, mesh: str, ways: int, strategy: str, placement: Placement) -> None:
    plain = Placement(tuple(tuple(sorted(h)) for h in zip(*[iter(range(4))] * (4 // len(placement.homes)))))
    world = 2 if mesh == "ep=2" else 4
    (_, tokens, _), *_ = ranks.run(world, trained, mesh, ways, strategy, plain, timeout=180.0)
    for errors, have, busy in ranks.run(world, trained, mesh, ways, strategy, placement, timeout=180.0):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda x: x[1])
        assert have == tokens and sum(busy) == sum(tokens)
        if not placement.room:
            assert busy == [sum(tokens[e] for e in h) for h in placement.homes]


def piped(schedule: str) -> float:
    """The largest difference from the unsharded model after two steps with copies of experts in stages."""
    alone, given = deepseek(), batch(8)
    pm = autopar.parallelize(
        copy.deepcopy(alone), "ep=2,pp=2", kwargs=rows(given, 2), strategy=f"schedule={schedule},microbatches=4",
        placement={LAYER: HALVES},
    )  # fmt: skip
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (alone, pm)]
    for _ in range(2):
        alone(**given, use_cache=False).loss.backward()
        pm.train_step(**rows(given, 2))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    have = pm.full_parameters()
    return max(float((have[n] - p).abs().max()) for n, p in alone.named_parameters())


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_training_in_stages_whose_backward_is_split(ranks: Ranks, schedule: str) -> None:
    assert max(ranks.run(4, piped, schedule, timeout=180.0)) < 1e-5


def resumed(folder: str) -> tuple[float, float]:
    """A checkpoint of one placement read with another: differences of parameters and, by a further step, of moments."""
    alone, given = Moe().eval(), states()
    first, second, plain = (
        autopar.parallelize(copy.deepcopy(alone), "ep=4", args=(rows(given),), loss=squared, placement=p)
        for p in ({"experts": COPIED}, {"experts": Placement(((2,), (0,), (3,), (1,)))}, None)
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, second, plain)]

    def step(pm: Any, optimizer: Any) -> dict[str, Any]:
        pm.train_step(rows(given))
        optimizer.step()
        optimizer.zero_grad()
        out: dict[str, Any] = pm.full_parameters()
        return out

    step(first, optimizers[0])
    first.save(folder, optimizers[0])
    for pm, optimizer in ((second, optimizers[1]), (plain, optimizers[2])):
        step(pm, optimizer)
        pm.load(folder, optimizer)
    have = [pm.full_parameters() for pm in (first, second, plain)]
    same = max(float((a[n] - have[0][n]).abs().max()) for a in have for n in a)
    have = [step(pm, o) for pm, o in zip((first, second, plain), optimizers)]
    return same, max(float((a[n] - have[0][n]).abs().max()) for a in have for n in a)


def test_checkpoints_know_no_placement(ranks: Ranks, tmp_path: Any) -> None:
    for same, after in ranks.run(4, resumed, str(tmp_path / "one"), timeout=120.0):
        assert same == 0.0 and after < 1e-6


def loaded() -> tuple[bool, float]:
    """A whole state dict read under a placement, and given back."""
    alone = Moe().eval()
    pm = autopar.parallelize(Moe(), "ep=4", args=(rows(states()),), loss=squared, placement={"experts": MOVED})
    with torch.no_grad():
        for p in (*alone.parameters(), *pm.parameters()):
            p.add_(torch.rand(()))
    pm.load_state_dict(alone.state_dict())
    have = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in pm.state_dict().items()}
    wrong = max(float((have[n] - t).abs().max()) for n, t in alone.state_dict().items())
    rank = dist.get_rank()
    local = dict(pm.named_parameters())["experts.up"]._local_tensor
    return torch.equal(local[0], alone.experts.up[MOVED.homes[rank][0]]), wrong


def test_state_dicts_know_no_placement(ranks: Ranks) -> None:
    assert ranks.run(4, loaded) == [(True, 0.0)] * 4


def compiled() -> float:
    """The largest difference of a gradient in compiled code."""
    alone, x = Moe().eval(), states()
    squared(alone(x)).backward()
    pm = autopar.parallelize(
        alone, "ep=4", args=(rows(x),), loss=squared, strategy="expert_capacity=4", placement={"experts": COPIED}
    )
    pm.compile(backend="aot_eager")
    pm.train_step(rows(x))
    want = {n: p.grad for n, p in alone.named_parameters()}
    return max(float((g - want[n]).abs().max()) for n, g in pm.full_gradients().items())  # type: ignore[operator]


def test_compiled_with_static_shapes(ranks: Ranks) -> None:
    assert max(ranks.run(4, compiled, timeout=120.0)) < 1e-5


def apart() -> None:
    """Ranks that were given different placements."""
    own = MOVED if dist.get_rank() else COPIED
    autopar.parallelize(Moe(), "ep=4", args=(rows(states()),), loss=squared, placement={"experts": own})


def test_ranks_must_agree(ranks: Ranks) -> None:
    ranks.refused(4, "rank-mismatch", apart)


@pytest.mark.parametrize(
    ("mesh", "placement"),
    [("ep=4", {"elsewhere": MOVED}), ("ep=2", {"experts": MOVED}), ("dp=4", {"experts": MOVED}),
     ("ep=4", {"experts": Placement(((0, 7), (1, 6), (2, 5), (3, 4)))})],
)  # fmt: skip
def test_placements_of_something_else_are_refused(mesh: str, placement: dict[str, Placement]) -> None:
    with pytest.raises(AutoparError, match="bad-placement"):
        autopar.verify(Moe().eval(), mesh, (states(),), loss=squared, placement=placement)
