"""On a context axis weights stay whole, also those that moves and arithmetic make of parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.context.models import Attend, rows


class Dense(nn.Module):
    """A product or attention, and experts that take all tokens by einsum; weights are scaled and transposed."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        width = rows().shape[-1]
        self.mix = Attend() if attends else nn.Linear(width, width)
        self.up, self.down = (nn.Parameter(torch.randn(4, *s) / 4) for s in ((width, 8), (8, width)))
        self.scale, self.router = nn.Parameter(torch.ones(4, 1, 8)), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x + self.mix(x)).flatten(0, 1)
        hidden = F.silu(torch.einsum("td,edf->etf", tokens, self.up * self.scale))
        out = torch.einsum("etf,efd,te->td", hidden, self.down, self.router(tokens).softmax(-1))
        return (tokens + out).view_as(x)


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("mesh", ["cp=2", "dp=2,cp=2", "cp=2,ep=2"])
def test_experts_by_einsum(mesh: str, attends: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Dense(attends), Dense(attends))
    report = autopar.verify(model, mesh, args=(rows(),), loss=lambda out: out.square().sum())
    assert report.ok and report.tolerance == 1e-10, str(report)
