"""Dropout on real ranks: the same mask where a value is the same, different masks where ranks hold different parts."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.api.models import BITS, WIDTH, Dropped, DroppedTokens, features, seeded
from tests.ranks import Ranks

SHAPE = (4, 8, WIDTH)


def masks(out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of hidden features [rows, tokens, half, feature], and of the output."""
    codes, outer = out
    return codes.long()[..., None] >> torch.arange(BITS) & 1 == 1, outer.ne(0)


def drawn(mesh: str, seed: int, steps: int = 1) -> dict[str, Any]:
    """Masks of Dropped in each step, and the program."""
    data = 2 if "dp=2" in mesh else 1
    x = torch.ones(SHAPE).tensor_split(data)[torch.distributed.get_rank() * data // 4]
    pm = autopar.parallelize(seeded(Dropped), mesh, args=(x,), seed=seed)
    with torch.no_grad():
        outputs = [pm(x) for _ in range(steps)]
    return {"masks": [masks(out) for out in outputs], "outputs": outputs, "dump": pm.dump()}


def kept(mask: Tensor) -> float:
    return float(mask.double().mean())


def test_masks_follow_the_mesh(ranks: Ranks) -> None:
    found = ranks.run(4, drawn, "dp=2,tp=2", 7)
    assert re.search(r"dropout\(.* f32\[2@dp, 8, 16@tp\]", found[0]["dump"]), found[0]["dump"]
    for a, b in ((0, 1), (2, 3)):  # the tp ranks of one data rank
        for mine, other in zip(found[a]["outputs"][0], found[b]["outputs"][0], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
    for mine, other in zip(found[0]["masks"][0], found[2]["masks"][0], strict=True):  # data ranks
        assert 0.4 < kept(mine == other) < 0.6
    hidden, outer = found[0]["masks"][0]
    first, second = hidden.unbind(2)  # the features of both tp ranks
    assert 0.4 < kept(first == second) < 0.6
    assert kept(hidden) == pytest.approx(0.5, abs=5 * 0.5 / hidden.numel() ** 0.5)
    assert kept(outer) == pytest.approx(0.5, abs=5 * 0.5 / outer.numel() ** 0.5)


def test_steps_and_seeds(ranks: Ranks) -> None:
    first = ranks.run(4, drawn, "tp=4", 7, 2)[0]["masks"]
    again = ranks.run(4, drawn, "tp=4", 7, 2)[0]["masks"]
    other = ranks.run(4, drawn, "tp=4", 8)[0]["masks"]
    for i in range(2):
        assert torch.equal(first[0][i], again[0][i]) and torch.equal(first[1][i], again[1][i])
        assert not torch.equal(first[0][i], first[1][i])
        assert not torch.equal(first[0][i], other[0][i])


def resumed() -> tuple[list[Tensor], list[Tensor]]:
    """Masks of steps 2 and 3: going on, and in a new module that takes the state after step 1."""
    x = torch.ones(SHAPE)
    pm = autopar.parallelize(seeded(Dropped), "tp=2", args=(x,), seed=3)
    new = autopar.parallelize(seeded(Dropped), "tp=2", args=(x,), seed=99)
    with torch.no_grad():
        pm(x)
        new.streams.load_state_dict(pm.streams.state_dict())
        on, other = ([masks(m(x))[0] for _ in range(2)] for m in (pm, new))
    return on, other


def test_saved_state_continues_the_stream(ranks: Ranks) -> None:
    for on, new in ranks.run(2, resumed):
        assert all(torch.equal(a, b) for a, b in zip(on, new, strict=True))
        assert not torch.equal(on[0], on[1])


def sequence() -> tuple[list[Tensor], str]:
    half = features(1, 4, WIDTH)
    x = torch.cat([half, half], 1)
    pm = autopar.parallelize(seeded(DroppedTokens), "tp=2", args=(x,), strategy="sequence_parallel", seed=5)
    with torch.no_grad():
        return list(pm(x)), pm.dump()


def test_each_rank_drops_its_own_tokens(ranks: Ranks) -> None:
    (found, dump), (other, _) = ranks.run(2, sequence)
    assert re.search(r"dropout\(.* f32\[1, 4@tp, 16\]", dump), dump
    for mine, theirs in zip(found, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    first, second = found[0].ne(0).chunk(2, 1)  # equal tokens on both ranks
    assert 0.2 < kept(first == second) < 0.8
    assert kept(found[0].ne(0)) == pytest.approx(0.5, abs=5 * 0.5 / found[0].numel() ** 0.5)


class Counted(nn.Module):
    """With a bias of 1 and no weight, the loss is the sum of the bias's gradient: that of the very same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dropped()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0].sum() / 2**BITS


def counted() -> tuple[float, float]:
    x = features(*SHAPE)
    pm = autopar.parallelize(seeded(Counted), "tp=2", args=(x,), seed=1)
    loss = pm.train_step(x)
    gradient = pm.full_gradients()["inner.up.bias"]
    assert gradient is not None
    return float(loss), float(gradient.sum())


def test_backward_uses_the_mask_of_the_forward(ranks: Ranks) -> None:
    for loss, gradient in ranks.run(2, counted):
        assert loss == pytest.approx(gradient) and loss > 0


def evaluated() -> tuple[list[Tensor], list[Tensor]]:
    x = features(*SHAPE)
    model = seeded(Dropped)
    pm = autopar.parallelize(model, "tp=2", args=(x,)).eval()
    with torch.no_grad():
        return list(pm(x)), list(model.eval()(x))


def test_no_dropout_in_eval_mode(ranks: Ranks) -> None:
    for found, want in ranks.run(2, evaluated):
        torch.testing.assert_close(found, want)
