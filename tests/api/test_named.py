"""The tree that the parallel module shows: what can be walked, what cannot be set, and what is said of losses."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import AutoparError, AutoparWarning
from tests.api.models import WIDTH, features, seeded
from tests.emit.fake import world


class Named(nn.Module):
    """Has settings of its own, of its class and of its parts, a list, and a module with two names."""

    power = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.drop = 0.5, nn.Dropout(0.0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH)])
        self.again = self.drop

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = self.again(self.drop(layer(x)))
        return (x**self.power).mean() * self.tau, x.abs().mean()


def made() -> Any:
    model = seeded(Named)
    return autopar.parallelize(model, "dp=1", (features(4, WIDTH),), heartbeat=None, loss=lambda out: out[0])


def test_settings_of_the_model_cannot_be_changed() -> None:
    pm = made()
    for place, name, value in [
        (pm, "tau", 1.0), (pm, "power", 3.0), (pm.drop, "p", 0.9), (pm, "drop", nn.Dropout(0.9)), (pm.layers, "0", None)
    ]:  # fmt: skip
        with pytest.raises(AutoparError, match=name) as raised:
            setattr(place, name, value)
        assert raised.value.slug == "fixed-module"
    for hook in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        with pytest.raises(AutoparError, match=hook):
            getattr(pm.layers[0], hook)(lambda *args: None)
    pm.mine, pm.drop.mine, pm.training = 3, 4, True
    pm.layers[0].weight.requires_grad_(True)
    pm.train_step(features(4, WIDTH))
    later = autopar.parallelize(seeded(Named), "dp=1", heartbeat=None)
    with pytest.raises(AutoparError, match="tau"):
        later.tau = 1.0
    with pytest.raises(AutoparError) as raised:
        len(later)
    assert raised.value.slug == "not-compiled"


def test_lists_can_be_walked() -> None:
    pm = made()
    assert len(pm.layers) == 3 and [*pm.layers] == [*pm.layers.children()]
    assert pm.layers[-1] is pm.layers[2] is pm.get_submodule("layers.2") and bool(pm.layers[1])
    assert [*pm.layers[:2]] == [pm.layers[0], pm.layers[1]] and pm["drop"] is pm.drop
    assert pm.again is pm.drop
    with pytest.raises(TypeError, match="list"):
        pm[0]
    with pytest.raises(IndexError):
        pm.layers[3]


def test_two_scalars_are_no_loss() -> None:
    x = features(4, WIDTH)
    pm = autopar.parallelize(seeded(Named), "dp=1", (x,), heartbeat=None)
    with pytest.raises(AutoparError, match="2 of them scalar") as raised:
        pm.train_step(x)
    assert raised.value.slug == "no-loss" and "loss=" in str(raised.value.fix)


def test_a_loss_outside_is_warned_of() -> None:
    """Once, where its gradients would be summed over several data ranks."""
    x = features(4, WIDTH)
    with world(2), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        pm = autopar.parallelize(seeded(lambda: nn.Linear(WIDTH, 2)), "dp=2", (x,), heartbeat=None)
        with torch.no_grad():
            pm(x)
        assert not heard
        for _ in range(2):
            pm(x).mean().backward()
    (said,) = [w for w in heard if issubclass(w.category, AutoparWarning)]
    assert "2 times" in str(said.message) and "loss=" in str(said.message)
