"""What a forward does beside its ops: gradients that it cuts or keeps, state that it holds, numbers that it draws."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import AutoparError
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.trace import trace
from autopar.trace.blueprint import blueprint, copied

X = torch.linspace(-2.0, 2.0, 32).reshape(4, 8)
Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two products, a buffer, and plain attributes of every sort."""

    q: Tensor

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.i, self.o = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("q", torch.ones(()))
        self.function = function
        self.n = 0
        self.log: list[int] = []
        self.memory: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def check(model: nn.Module) -> None:
    """Loss, gradients and buffers of the trace against eager mode; the model's attributes are as before."""
    model.zero_grad()
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    program = trace(model, (X,), {}, mesh=Mesh.parse("dp=1")).program
    assert {n: dict(m.__dict__) for n, m in model.named_modules()} == before, "attributes"
    table = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {n: table[n].detach().clone().requires_grad_(p.kind == "parameter") for n, p in program.params.items()}
    results = dict(zip(((o.kind, o.name) for o in program.outputs), evaluate(program, values, [X])))
    results["loss", ""].backward()
    loss = model(X)
    loss.backward()
    torch.testing.assert_close(results["loss", ""], loss)
    for name, p in model.named_parameters():
        torch.testing.assert_close(values[name].grad, p.grad, msg=name)
    for name, b in model.named_buffers():
        torch.testing.assert_close(results.get(("buffer", name), values[name]), b)


def same_under_no_grad(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * 1.0
    with torch.no_grad():
        k, j = F.dropout(h.to(h.device), 0.0, False), h * 2
    return m.o(k * j).mean()


def gradients_inside_no_grad(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * 1.0
    with torch.no_grad():
        t = h * 2
        with torch.enable_grad():
            k = t * m.o.weight
    return m.o(k + h).mean()


def fresh_values_are_written(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * 1.0
    with torch.no_grad():
        k = (h * 2).clamp_(-0.3, 0.3)
    z = torch.zeros(4, 8)
    z[0] = h[1]
    z[:, 2].mul_(3)
    return m.o(h * k + z + h.detach().clamp_(min=0)).mean()


def detached_in_place(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * 1.0
    h.detach_()
    return m.o(h).mean()


def inference(m: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        t = m.i(x).mean(1, keepdim=True)
    return F.mse_loss(m.o(x), t.clone())


def under_idle_autocast(m: Net, x: Tensor) -> Tensor:
    h = m.i(x)
    with torch.autocast("cpu", enabled=False):
        with torch.no_grad():
            t = h * 2
        k = h * t
    return m.o(k).mean()


def data_is_read(m: Net, x: Tensor) -> Tensor:
    return m.o(m.i(x) * m.i.weight.data.sum()).mean()


def buffer_assigned(m: Net, x: Tensor) -> Tensor:
    m.q = m.q + 1
    return m.o(m.i(x)).mean() * m.q


def output_is_kept(m: Net, x: Tensor) -> Tensor:
    m.memory = m.i(x)
    m.other = m.memory * 2
    return m.o(m.memory).mean()


def set_for_good(m: Net, x: Tensor) -> Tensor:
    if m.memory is None:
        m.memory = "mean"
    return m.o(x).mean() if m.memory == "mean" else m.o(x).sum()


RIGHT = [
    set_for_good,
    same_under_no_grad,
    gradients_inside_no_grad,
    fresh_values_are_written,
    detached_in_place,
    inference,
    under_idle_autocast,
    data_is_read,
    buffer_assigned,
]


@pytest.mark.parametrize("function", RIGHT, ids=lambda f: f.__name__)
def test_as_in_eager_mode(function: Forward) -> None:
    check(Net(function))


def test_attributes_that_a_forward_leaves() -> None:
    model = Net(output_is_kept)
    check(model)
    assert not model.memory.is_leaf  # of the eager call
    check(model)
    assert isinstance(blueprint(model), Net) and isinstance(copied(model), Net)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["weight_norm", "prune"])
def test_computed_weights(how: str) -> None:
    model = Net(lambda m, x: m.o(m.i(x)).mean())
    if how == "prune":
        from torch.nn.utils import prune

        prune.l1_unstructured(model.i, "weight", 0.5)  # type: ignore[no-untyped-call]
    else:
        nn.utils.weight_norm(model.i)
    check(model)
    trace(blueprint(model), (X,), {}, mesh=Mesh.parse("dp=1"))


def written_under_no_grad(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * 1.0
    with torch.no_grad():
        h.clamp_(-0.3, 0.3)
    return m.o(h).mean()


def indexed_under_no_grad(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * 1.0
    with torch.no_grad():
        h[:, 1] = 0.0
    return m.o(h).mean()


def written_through_detach(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * 1.0
    h.detach().mul_(2.0)
    return m.o(h).mean()


def written_through_data(m: Net, x: Tensor) -> Tensor:
    h = m.i(x)
    h.data.clamp_(-0.1, 0.1)
    return m.o(h).mean()


def gradient_written_through_detach(m: Net, x: Tensor) -> Tensor:
    z = torch.zeros(4, 8)
    z.detach()[0] = m.i(x)[0]
    return m.o(z).mean()


def gradient_taken(m: Net, x: Tensor) -> Tensor:
    h = m.i(x)
    (g,) = torch.autograd.grad(m.o(h).sum(), h, create_graph=True)
    return (g**2).sum()


def frozen_inside(m: Net, x: Tensor) -> Tensor:
    m.i.requires_grad_(False)
    return m.o(m.i(x)).mean()


def frozen_by_attribute(m: Net, x: Tensor) -> Tensor:
    m.i.weight.requires_grad = False
    return m.o(m.i(x)).mean()


def data_assigned(m: Net, x: Tensor) -> Tensor:
    m.i.weight.data = m.i.weight * 2
    return m.o(m.i(x)).mean()


def buffer_with_gradient(m: Net, x: Tensor) -> Tensor:
    m.q = m.q + m.i(x).mean()
    return m.o(x).mean() * m.q


def counted(m: Net, x: Tensor) -> Tensor:
    m.n += 1
    return m.o(x).mean() * min(1.0, m.n / 10)


def logged(m: Net, x: Tensor) -> Tensor:
    m.log.append(1)
    return m.o(x).mean() * len(m.log)


def remembered(m: Net, x: Tensor) -> Tensor:
    h = m.i(x)
    if m.memory is not None:
        h = h + m.memory
    m.memory = h.detach()
    return m.o(h).mean()


def new_attribute_met_again(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * (2 if hasattr(m, "warm") else 1)
    m.warm = True
    return m.o(h).mean()


def private_flag_met_again(m: Net, x: Tensor) -> Tensor:
    h = m.i(x) * (2 if getattr(m, "_warm", False) else 1)
    m._warm = True
    return m.o(h).mean()


def python_draw(m: Net, x: Tensor) -> Tensor:
    return m.o(x).mean() * random.random()


def numpy_draw(m: Net, x: Tensor) -> Tensor:
    return m.o(x).mean() * float(np.random.rand())


REFUSED: list[tuple[Forward, str]] = [
    (written_under_no_grad, "custom-backward"),
    (indexed_under_no_grad, "custom-backward"),
    (written_through_detach, "custom-backward"),
    (written_through_data, "custom-backward"),
    (gradient_written_through_detach, "custom-backward"),
    (gradient_taken, "custom-backward"),
    (frozen_inside, "custom-backward"),
    (frozen_by_attribute, "custom-backward"),
    (data_assigned, "input-mutation"),
    (buffer_with_gradient, "input-mutation"),
    (counted, "python-state"),
    (logged, "python-state"),
    (remembered, "python-state"),
    (new_attribute_met_again, "python-state"),
    (private_flag_met_again, "python-state"),
    (python_draw, "random-op"),
    (numpy_draw, "random-op"),
]


@pytest.mark.parametrize(("function", "slug"), REFUSED, ids=lambda v: getattr(v, "__name__", v))
def test_refused(function: Forward, slug: str) -> None:
    model = Net(function)
    before, drawn = {**model.__dict__, "log": []}, (random.getstate(), str(np.random.get_state()))
    with pytest.raises(AutoparError) as caught:
        trace(model, (X,), {}, mesh=Mesh.parse("dp=1"))
    assert caught.value.slug == slug and caught.value.fix
    assert model.__dict__ == before and all(p.requires_grad for p in model.parameters())
    assert drawn == (random.getstate(), str(np.random.get_state()))


def test_a_counter_that_nobody_reads_is_said() -> None:
    def function(m: Net, x: Tensor) -> Tensor:
        m.n += 1
        return m.o(x).mean()

    traced = trace(Net(function), (X,), {}, mesh=Mesh.parse("dp=1"))
    assert any(note.startswith("n: the forward updates it") for note in traced.notes)


def test_a_causal_mask_of_a_transformer_is_not_looked_at() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    x = torch.randn(4, 8, 8)
    program = trace(layer, (x, x), {"tgt_mask": mask}, mesh=Mesh.parse("dp=1"), batch_dims=(0, 0, None)).program
    with torch.no_grad():
        got = evaluate(program, dict(layer.named_parameters()), [x, x, mask])[0]
        torch.testing.assert_close(got, layer(x, x, tgt_mask=mask), rtol=1e-4, atol=1e-5)


def test_a_batch_norm_that_averages_over_all_steps() -> None:
    model = Net(lambda m, x: m.o(m.norm(m.i(x)) ** 2).mean())  # type: ignore[operator]
    model.norm = nn.BatchNorm1d(8, momentum=None)  # type: ignore[arg-type]
    check(model)


SEEN: list[Tensor] = []


class Capturing(nn.Module):
    """Hooks on its layers, set by the first call, which says so in a flag; they take down what the layers give."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.o = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "_hooked", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, out: SEEN.append(out))
            self._hooked = True
        SEEN.clear()
        for layer in self.layers:
            x = layer(x)
        return self.o(torch.stack(SEEN).sum(0)).mean()


@pytest.mark.parametrize("called", [False, True])
def test_hooks_that_a_first_call_sets(called: bool) -> None:
    model = Capturing()
    if called:
        model(X)
    traced = trace(model, (X,), {}, mesh=Mesh.parse("dp=1")).program
    assert [len(m._forward_hooks) for m in model.layers] == [int(called)] * 4 and hasattr(model, "_hooked") == called
    assert len(traced.calls_of("layers.*")) == 4
    check(model)
