"""State dicts by original names."""

from typing import Any

import pytest
import torch

from autopar.emit.module import ParallelModule
from autopar.emit.params import Place
from autopar.errors import AutoparError
from tests.emit.test_module import agree, on_ranks
from tests.emit.tiny import batch, mine, tiny


def other() -> dict[str, torch.Tensor]:
    """The model's state dict with other values."""
    return {n: t * 2 + 1 for n, t in tiny().state_dict().items()}


@pytest.mark.parametrize("text", ["tp=1", "tp=2", "dp=2,tp=2"])
def test_loads_whole_tensors_and_its_own(text: str) -> None:
    want = other()

    def body(pm: ParallelModule, place: Place) -> Any:
        mine_before = {n: t.clone() for n, t in pm.state_dict().items()}
        assert not pm.load_state_dict(want).missing_keys
        first = pm.full_parameters()
        loaded = pm.state_dict()
        assert {n: (type(t), t.shape) for n, t in loaded.items()} == {
            n: (type(t), t.shape) for n, t in mine_before.items()
        }
        pm.load_state_dict(mine_before)
        return first, pm.full_parameters(), float(pm.get_buffer("count"))

    names = [n for n, _ in tiny().named_parameters()]
    for first, second, count in on_ranks(text, body):
        agree(first, {n: want[n] for n in names})
        agree(second, {n: p.detach() for n, p in tiny().named_parameters()})
        assert count == 0.0


def test_trains_on_what_was_loaded() -> None:
    model, state = tiny(), other()
    model.load_state_dict(state)
    model(batch())["loss"].backward()

    def body(pm: ParallelModule, place: Place) -> Any:
        pm.train_step(mine(batch(3), place))
        pm.zero_grad()
        pm.load_state_dict(state)
        pm.train_step(mine(batch(), place))
        return pm.full_gradients()

    for got in on_ranks("dp=2,tp=2", body):
        agree(got, {n: p.grad for n, p in model.named_parameters()})


def test_mismatches_are_listed_and_nothing_is_written() -> None:
    given = other()

    def body(pm: ParallelModule, place: Place) -> None:
        before = pm.full_parameters()
        state: dict[str, Any] = dict(given)
        del state["spare"]
        state["layers.0.up.bias"] = torch.zeros(3)
        state["layers.9.gain"] = torch.zeros(6)
        with pytest.raises(AutoparError) as error:
            pm.load_state_dict(state)
        text = str(error.value)
        assert error.value.slug == "state-dict-mismatch"
        assert "missing: spare" in text and "unexpected: layers.9.gain" in text
        assert "misshaped: layers.0.up.bias: shape [3], expected [10]" in text
        with pytest.raises(AutoparError, match="layers.0.up.bias"):
            pm.load_state_dict(state, strict=False)
        state["layers.0.up.bias"] = 3
        with pytest.raises(AutoparError, match="a int, expected a tensor"):
            pm.load_state_dict(state)
        agree(pm.full_parameters(), dict(before))
        del state["layers.0.up.bias"]
        result = pm.load_state_dict(state, strict=False)
        assert result.missing_keys == ["spare", "layers.0.up.bias"] and result.unexpected_keys == ["layers.9.gain"]

    on_ranks("tp=2", body)


def test_tied_names() -> None:
    given = other()

    def body(pm: ParallelModule, place: Place) -> None:
        state = dict(given)
        second = state.pop("head.weight")
        pm.load_state_dict(state)
        state["head.weight"] = state.pop("embed.weight") * 3
        pm.load_state_dict(state)
        torch.testing.assert_close(pm.full_parameters()["embed.weight"], second * 3)
        assert pm.get_parameter("head.weight") is pm.get_parameter("embed.weight")
        state["embed.weight"] = second
        with pytest.raises(AutoparError, match="head.weight: differs from embed.weight, to which it is tied"):
            pm.load_state_dict(state)

    on_ranks("tp=2", body)
