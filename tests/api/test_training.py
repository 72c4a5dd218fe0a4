"""Gradients, optimizers, meta weights, state dicts, compiled and printed modules, on real ranks."""

import copy
import pathlib
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import autopar
from autopar.ir.mesh import Mesh
from autopar.models import load
from autopar.runtime.axis import axes_of
from tests.api.models import Lm, batch, seeded
from tests.api.test_inputs import rows, same, stepped
from tests.ranks import Ranks


def mine(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows on dp=2,tp=2."""
    return rows(data, 2, dist.get_rank() // 2)


def square(model: nn.Module, **kwargs: Any) -> autopar.ParallelModule:
    return autopar.parallelize(model, "dp=2,tp=2", kwargs=mine(batch()), **kwargs)


def accumulation() -> None:
    """Steps add to the gradients until zero_grad, whatever their shapes; a backward of the output does the same."""
    model = seeded(Lm)
    pm = square(model)
    given = [batch(seed=1), batch(5, seed=2), batch(length=3, seed=3)]
    for data in given:
        model(**data).loss.backward()
        pm.train_step(**mine(data))
    same(pm.full_gradients(), {n: p.grad for n, p in model.named_parameters()})
    pm.zero_grad()
    assert all(p.grad is None for p in pm.parameters())
    for data in given:
        loss = pm(**mine(data)).loss
        loss.backward()
        assert_close(loss.detach(), model(**data).loss.detach())
    same(pm.full_gradients(), {n: p.grad for n, p in model.named_parameters()})


def frozen() -> None:
    """Frozen parameters get no gradient; flags may change between steps."""
    model = seeded(Lm)
    for p in model.layers[0].parameters():
        p.requires_grad_(False)
    model.layers[1].up.bias.requires_grad_(False)
    pm = square(model)
    for name in (None, "layers.1.up.bias", "layers.0.down.weight", "layers.1.norm.weight"):
        if name is not None:
            for module in (model, pm):
                p = module.get_parameter(name)
                p.requires_grad_(not p.requires_grad)
        pm.zero_grad()
        assert {n for n, p in pm.named_parameters() if p.requires_grad} == {
            n for n, p in model.named_parameters() if p.requires_grad
        }
        loss, grads = stepped(model, batch())
        assert float(pm.train_step(**mine(batch()))) == pytest.approx(loss, rel=1e-5)
        same(pm.full_gradients(), grads)


def optimized() -> None:
    """Clipping and AdamW over the DTensors, three steps."""
    model = seeded(Lm)
    pm = square(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, model))
    for seed in range(3):
        pm.train_step(**mine(batch(seed=seed)))
        stepped(model, batch(seed=seed))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        assert_close(pm.clip_grad_norm_(0.3), norm, rtol=1e-4, atol=0)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for name, p in pm.full_parameters().items():
        assert_close(p, model.get_parameter(name).detach(), rtol=1e-3, atol=1e-4)


def held(mesh: str, ways: int) -> dict[str, Tensor]:
    """Whole initial weights of a model on the meta device."""
    with torch.device("meta"):
        model = Lm()
    kwargs = rows(batch(), ways, dist.get_rank() * ways // dist.get_world_size())
    pm = autopar.parallelize(model, mesh, kwargs={n: t.to("meta") for n, t in kwargs.items()}, seed=11)
    assert all(t.is_meta for t in model.parameters())
    start = pm.full_parameters()
    assert all(bool(torch.isfinite(t).all()) for t in start.values())
    whole = seeded(Lm)
    pm.load_state_dict(whole.state_dict())
    loss, grads = stepped(whole, batch())
    assert float(pm.train_step(**kwargs)) == pytest.approx(loss, rel=1e-5)
    same(pm.full_gradients(), grads)
    assert pm.get_parameter("head.weight") is pm.get_parameter("embed.weight")
    assert "head.weight" not in start
    return start


def test_meta_weights_are_the_same_on_every_mesh(ranks: Ranks) -> None:
    found = [*ranks.run(1, held, "dp=1", 1), *ranks.run(2, held, "tp=2", 1), *ranks.run(2, held, "dp=2", 2)]
    found += ranks.run(4, held, "dp=2,tp=2", 2)
    for weights in found[1:]:
        assert all(torch.equal(t, weights[n]) for n, t in found[0].items())
    other = seeded(Lm).state_dict()
    assert not torch.equal(found[0]["embed.weight"], other["embed.weight"])
    assert float(found[0]["layers.0.up.weight"].std()) > 0.05 and not found[0]["layers.0.norm.bias"].any()


def state_dicts() -> None:
    """A DTensor state dict goes to another mesh and comes back; names and buffers are the model's."""
    model = seeded(Lm)
    pm = square(model)
    pm.train_step(**mine(batch()))
    state = pm.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(isinstance(state[n], DTensor) for n, _ in model.named_parameters(remove_duplicate=False))
    torch.manual_seed(4)
    other = autopar.parallelize(Lm(), "tp=4", kwargs=batch())
    other.load_state_dict(state)
    for name, p in other.full_parameters().items():
        assert torch.equal(p, model.get_parameter(name))
    assert int(other.get_buffer("calls")) == 1
    torch.manual_seed(5)
    third = square(Lm())
    third.load_state_dict(other.state_dict())
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in third.full_parameters().items())
    plain = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in third.state_dict().items()}
    seeded(Lm).load_state_dict(plain)


def compiled() -> None:
    """Compiled functions compute what the eager ones do."""
    model = seeded(Lm)
    eager, fast = square(model), square(copy.deepcopy(model))
    torch._dynamo.reset()
    fast.compile(backend="aot_eager")
    for seed in range(2):
        want = eager.train_step(**mine(batch(seed=seed)))
        assert_close(fast.train_step(**mine(batch(seed=seed))), want)
    assert_close(fast.full_gradients(), eager.full_gradients())
    assert_close(fast.eval()(**mine(batch())).logits, eager.eval()(**mine(batch())).logits)


@pytest.mark.parametrize("function", [accumulation, frozen, optimized, state_dicts, compiled], ids=lambda f: f.__name__)
def test_on_four_ranks(ranks: Ranks, function: Callable[[], None]) -> None:
    ranks.run(4, function, timeout=120.0)


def printed(folder: pathlib.Path) -> tuple[float, float]:
    """Loss of the Python file that a Hugging Face model prints, and of the model itself."""
    loaded = load("hf:llama-tiny", meta=False)
    model = loaded.model.eval()
    model.config.use_cache = False
    whole = loaded.kwargs(4, 12)
    pm = autopar.parallelize(model, "dp=2,tp=2", kwargs=mine(whole))
    path = folder / f"{dist.get_rank()}.py"
    path.write_text(pm.to_python())
    script = runpy.run_path(str(path), run_name="script")
    mesh = Mesh.parse("dp=2,tp=2")
    axes = axes_of(mesh, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    loss = script["Model"](model.state_dict(), axes).step(*mine(whole).values())
    return float(loss), float(model(**whole).loss.detach())


def test_printed_python_gives_the_loss_of_the_model(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    for got, want in ranks.run(4, printed, tmp_path):
        assert got == pytest.approx(want, rel=1e-5)
    assert len({path.read_text() for path in tmp_path.iterdir()}) == 1
