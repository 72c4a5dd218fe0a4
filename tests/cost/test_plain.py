"""Models without layers that repeat, and models of layers alone: planned and rehearsed like any other."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile import lower
from autopar.cost.forms import Forms
from autopar.cost.hardware import load
from autopar.cost.links import Links
from autopar.cost.program import price
from autopar.families import families
from autopar.ir.mesh import Mesh
from autopar.planner import plan
from autopar.plans import rehearsed

WIDTH = 64


class Plain(nn.Module):
    """Three projections of different sizes and a loss: nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.down(F.relu(self.up(x))))), y)


class Layers(nn.Module):
    """Equal layers with nothing before or behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, WIDTH, device="meta"), torch.zeros(rows, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_the_whole_model_is_priced_as_its_program(mesh: str) -> None:
    hardware, model, sizes = load("cpu"), Plain().to("meta"), Mesh.parse(mesh)
    made = families(model, inputs(2), {}, hardware=hardware, precision="fp32")
    rows = 64
    lowered = lower(model, inputs(rows), {}, sizes, "hardware=cpu", after="reshard", loss_only=True)
    real = price(lowered, hardware)
    axes = {a: np.array([float(sizes.size(a))]) for a in ("pp", "dp", "ep", "cp", "tp")}
    points = {"b": np.array([float(rows)]), "s": np.array([1.0]), **axes}
    forms = Forms(made[False, (False, False)])
    times = [u.times(points, Links.placed(hardware, axes, tuple(axes)), hardware) for u in forms.units]
    for part, seconds in enumerate(real.compute_seconds):
        assert sum((t.forward, t.backward)[part][0] for t in times) == pytest.approx(seconds, rel=1e-6)
    assert 4 * sum(t.weight[0] for t in times) == pytest.approx(real.memory["gradients"])


def test_a_plan_of_a_model_that_does_not_repeat_has_no_stages_and_says_why() -> None:
    plans = plan(Plain().to("meta"), "h100x8", inputs(4), batch=64)
    assert plans and all(p.option.sizes["pp"] == 1 and p.option.recompute == "none" for p in plans)
    assert "no plan has stages (pp)" in str(plans)
    step = rehearsed(plans[0])
    assert step is not None and step.option.seconds > 0 and step.option.peak > 0


def test_stages_that_are_asked_for_are_refused_with_the_reason() -> None:
    found = plan(Plain().to("meta"), "h100x8", inputs(4), batch=64, mesh="pp=2")
    assert not found and "no plan has stages (pp)" in found.hint


def test_recomputation_that_is_asked_for_is_kept() -> None:
    found = plan(Plain().to("meta"), "h100x8", inputs(4), batch=64, strategy="recompute=full")
    assert found and all(p.option.recompute == "full" for p in found)


def test_layers_alone_have_stages() -> None:
    plans = plan(Layers().to("meta"), "h100x4", inputs(4)[:1], batch=64, mesh="pp=4", loss=Tensor.sum)
    assert plans and not plans.notes and plans[0].option.sizes["pp"] == 4
    step = rehearsed(plans[0])
    assert step is not None and len(step.timeline.spans) == 4
