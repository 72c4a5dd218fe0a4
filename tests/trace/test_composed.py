"""Ops that torch composes of in-place steps, or differentiates by strides: the program's gradients are the model's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.errors import AutoparError
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.trace import trace


def _masked(x):
    y = x.clone()
    y[y < 0] = 0.5
    return y


FORMS = {
    "fill_diagonal_": lambda x: (x.T @ x).fill_diagonal_(0.0),
    "as_strided": lambda x: x.as_strided((6, 3), (6, 2), 1),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x.flip(0), torch.ones(6)),
    "glu": lambda x: F.glu(x, 1),
    "masked write": _masked,
    "windows": lambda x: x.unfold(1, 3, 3) * torch.arange(3),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x.flip(0), x.detach() ** 2 + 0.1 * x**2, full=True),
    "gaussian_nll_loss of one variance a row": lambda x: nn.GaussianNLLLoss(reduction="sum", eps=1.0)(
        x, x.flip(0), x.pow(2).mean(1)
    ),
    "einsum with a single row": lambda x: torch.einsum(
        "bse,besd->bsd", x.view(2, 3, 6), x.sin().view(2, 1, 3, 6).expand(2, 6, 3, 6)
    ),
    "einsum of one query": lambda x: torch.einsum(
        "bhd,bhkd->bhk", x.view(2, 3, 6), x.sin().view(2, 3, 1, 6).expand(2, 3, 4, 6)
    ),
    "circular pad": lambda x: F.pad(x[None], (2, 1), mode="circular"),
}


class Form(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return FORMS[self.name](x * self.weight).pow(2).sum()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.cell = nn.GRU(6, 4), nn.LSTMCell(4, 3)

    def forward(self, x):
        return self.cell(self.gru(x)[0])[0].pow(2).sum()


def compare(model, x):
    traced = trace(model, (x,), {}, mesh=Mesh.parse("dp=1"), loss=lambda out: out)
    values = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    got = evaluate(traced.program, {n: values.get(n, traced.constants.get(n)) for n in traced.program.params}, [x])[-1]
    want = model(x)
    got.backward(), want.backward()
    torch.testing.assert_close(got, want)
    for name, p in model.named_parameters():
        torch.testing.assert_close(values[name].grad, p.grad, msg=name)


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_the_models(name):
    torch.manual_seed(0)
    compare(Form(name), torch.randn(6, 6))


def test_recurrent_layers():
    torch.manual_seed(0)
    compare(Cells(), torch.randn(6, 6))


def test_running_instance_norm_is_refused():
    model = nn.InstanceNorm1d(3, track_running_stats=True)
    with pytest.raises(AutoparError, match="running statistics"):
        trace(model, (torch.randn(2, 3, 4),), {}, mesh=Mesh.parse("dp=1"))
