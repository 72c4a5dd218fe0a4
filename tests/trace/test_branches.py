"""``torch.cond`` is both branches and a choice; what that would change is refused."""

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError


class Chosen(nn.Module):
    """One of two layers, by the sign of a sum over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def yes(self, x: Tensor) -> Tensor:
        return self.one(x)

    def no(self, x: Tensor) -> Tensor:
        return self.two(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > self.one.weight.sum(), self.yes, self.no, (x,))


class Guarded(Chosen):
    """A branch that is there since the other one has no value, nor derivative, for what it is not chosen for."""

    def yes(self, x: Tensor) -> Tensor:
        return x.sqrt()

    def no(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return torch.cond(h.min() > 0, self.yes, self.no, (h,))


class Counting(Chosen):
    def yes(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().yes(x)


class Remembering(Chosen):
    def yes(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().yes(x)


class Unlike(Chosen):
    def yes(self, x: Tensor) -> Tensor:
        return self.one(x).sum(0)


def rows(sign: float) -> Tensor:
    return sign * torch.arange(1.0, 17.0).view(4, 4) / 4


@pytest.mark.parametrize("sign", (1.0, -1.0))
def test_both_answers_are_those_of_the_model(sign: float) -> None:
    report = autopar.verify(Chosen(), "dp=2,tp=2", (rows(sign),), loss=lambda y: y.pow(2).mean())
    assert report.ok and "trace.grad.two.weight" in report.errors, str(report)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile reads, for torch.cond in eager mode
def test_a_branch_that_is_not_chosen_gives_its_operands_no_gradient() -> None:
    report = autopar.verify(Guarded(), "dp=2,tp=2", (rows(-1.0),), loss=lambda y: y.pow(2).mean())
    assert report.ok and "grad.one.weight" in report.errors, str(report)


@pytest.mark.parametrize("kind", (Counting, Remembering, Unlike))
def test_branches_that_do_more_than_compute_are_refused(kind: type[Chosen]) -> None:
    with pytest.raises(AutoparError) as raised:
        autopar.verify(kind(), "dp=2", (rows(1.0),), loss=lambda y: y.pow(2).mean())
    assert raised.value.slug == "data-dependent-control-flow" and "torch.cond" in raised.value.message
