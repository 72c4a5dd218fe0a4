"""Rows that are chosen by their place in the batch: no microbatch knows by itself whether it has them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: x[0],
    "last": lambda x: x[-1],
    "slice": lambda x: x.narrow(0, 1, 2),
    "flat": lambda x: x.flatten()[13:],
    "gather": lambda x: x.gather(0, torch.tensor([[3], [1]]).expand(2, 8)),
}


class Rows(nn.Module):
    """A layer, and what ``function`` takes of its rows, or of the input's."""

    def __init__(self, function: Callable[[Tensor], Tensor], of_input: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function, self.of_input = nn.Linear(8, 8), function, of_input

    def forward(self, x: Tensor) -> Tensor:
        if self.of_input:
            return (self.layer(x) * self.function(x).sum()).pow(2).mean()
        return (self.function(self.layer(x)) * 3).sum() + self.layer(x).pow(2).mean()


def batch() -> tuple[Tensor]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.parametrize("mesh", ("dp=1", "dp=2"))
@pytest.mark.parametrize("name", CHOSEN)
def test_rows_of_what_layers_make_are_refused(name: str, mesh: str) -> None:
    with pytest.raises(AutoparError) as raised:
        autopar.verify(Rows(CHOSEN[name], False), mesh, batch(), strategy="microbatches=2")
    assert raised.value.slug == "batch-coupled-loss"


@pytest.mark.parametrize("name", CHOSEN)
def test_rows_of_inputs_are_known_to_all(name: str) -> None:
    report = autopar.verify(Rows(CHOSEN[name], True), "dp=1", batch(), strategy="microbatches=4")
    assert report.ok, str(report)
