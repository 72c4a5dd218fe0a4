"""The benchmark's own arithmetic; nothing is timed here."""

import torch
from torch import Tensor

from benchmarks.step import counted, interval, pairs


def test_interval_brackets_the_median() -> None:
    middle, low, high = interval([float(n) for n in range(31)])
    assert middle == 15.0
    assert low < middle < high
    assert interval([2.0] * 5) == (2.0, 2.0, 2.0)


def test_counts_flops_of_forward_and_backward() -> None:
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)

    def step() -> Tensor:
        loss = (x @ w).sum()
        loss.backward()
        return loss

    assert counted(step).flops == 3 * (2 * 3 * 4 * 5)
    assert not counted(step).collectives


def test_who_goes_first_alternates() -> None:
    order: list[str] = []

    def step(name: str) -> Tensor:
        order.append(name)
        return torch.zeros(())

    module = torch.nn.Identity()
    found = pairs(lambda: step("a"), lambda: step("b"), (module, module), 3)
    assert len(found) == 3
    assert order == ["a", "b", "b", "a"] * 3
