"""The emitted module against the unsharded model, all ranks in one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

from autopar.emit.module import ParallelModule
from autopar.emit.params import Place
from autopar.emit.units import Call
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.runtime.random import Streams
from autopar.runtime.simulate import device_mesh, run_ranks
from tests.emit.tiny import batch, mine, parallel, tiny

MESHES = ["tp=1", "tp=2", "dp=2,tp=1", "dp=2,tp=2", "tp=2,dp=2", "ep=2,dp=2,tp=1", "dp=2,tp=4/2", "pp=2,dp=2,tp=4/2"]


def on_ranks(text: str, body: Callable[[ParallelModule, Place], Any]) -> list[Any]:
    """``body`` on every rank of a mesh; ``tp=4/2`` has tp in two sub-axes."""
    mesh, model = Mesh.parse(text.removesuffix("/2")), tiny()
    mesh = mesh.split("tp", 2) if text.endswith("/2") else mesh

    def rank(_: int) -> Any:
        place = Place.of(mesh, device_mesh(mesh))
        return body(parallel(place, model), place)

    return run_ranks(mesh, rank, timeout=60.0)


def reference(steps: int = 1) -> tuple[dict[str, Tensor | None], Tensor]:
    model = tiny()
    for step in range(steps):
        loss = model(batch(step))["loss"]
        loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}, loss.detach()


def agree(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    assert list(got) == list(want)
    for name, w in want.items():
        g = got[name]
        assert (g is None) == (w is None), name
        if g is not None and w is not None:
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("text", MESHES)
def test_train_step_equals_the_model(text: str) -> None:
    grads, loss = reference()

    def body(pm: ParallelModule, place: Place) -> Any:
        total = pm.train_step(mine(batch(0), place))
        assert not total.requires_grad and total.dim() == 0 and type(total) is Tensor
        torch.testing.assert_close(total, loss)
        return pm.full_gradients()

    for got in on_ranks(text, body):
        agree(got, grads)


@pytest.mark.parametrize("text", ["tp=2", "dp=2,tp=2"])
def test_calls_accumulate_and_forwards_without_backward_leave_nothing(text: str) -> None:
    grads, _ = reference(2)

    def body(pm: ParallelModule, place: Place) -> Any:
        with torch.no_grad():
            pm(mine(batch(3), place))
        pm(mine(batch(4), place))
        ids = [id(p) for p in pm.parameters()]
        one = pm(mine(batch(0), place))["loss"]
        two = pm(x=mine(batch(1), place))["loss"]
        with torch.no_grad():
            pm(mine(batch(5), place))
        (one + two).backward()
        assert ids == [id(p) for p in pm.parameters()]
        count = pm.get_buffer("count")
        first = pm.full_gradients()
        pm.zero_grad()
        assert all(p.grad is None for p in pm.parameters())
        pm.train_step(mine(batch(0), place))
        pm.train_step(mine(batch(1), place))
        return first, pm.full_gradients(), float(count), float(pm.get_buffer("count"))

    for first, second, before, after in on_ranks(text, body):
        agree(first, grads)
        agree(second, grads)
        assert (before, after) == (5.0, 7.0)


@pytest.mark.parametrize("text", ["tp=1", "tp=2", "dp=2,tp=2"])
def test_outputs_and_names(text: str) -> None:
    model = tiny()
    want = model(batch())

    def body(pm: ParallelModule, place: Place) -> Any:
        out = pm(mine(batch(), place))
        return (
            out["logits"].detach(),
            mine(want["logits"].detach(), place),
            [n for n, _ in pm.named_parameters()],
            set(pm.state_dict()),
        )

    for got, rows, names, keys in on_ranks(text, body):
        torch.testing.assert_close(got, rows)
        assert names == [n for n, _ in model.named_parameters()]
        assert keys == set(model.state_dict())


@pytest.mark.parametrize("text", ["tp=2", "dp=2,tp=2", "dp=2,tp=1"])
@pytest.mark.parametrize("optimizer", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_adamw_with_clipping_equals_the_model(text: str, optimizer: dict[str, bool]) -> None:
    model = tiny()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **optimizer)
    norms = []
    for step in range(3):
        opt.zero_grad()
        model(batch(step))["loss"].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7))
        opt.step()

    def body(pm: ParallelModule, place: Place) -> Any:
        opt = torch.optim.AdamW(pm.parameters(), lr=0.1, weight_decay=0.1, **optimizer)
        seen = []
        for step in range(3):
            opt.zero_grad()
            pm.train_step(mine(batch(step), place))
            seen.append(pm.clip_grad_norm_(0.7))
            opt.step()
        return pm.full_parameters(), seen

    for got, seen in on_ranks(text, body):
        agree(got, {n: p.detach() for n, p in model.named_parameters()})
        torch.testing.assert_close(seen, norms)


@pytest.mark.parametrize("order", [1.0, 3.0, float("inf")])
def test_other_norms(order: float) -> None:
    model = tiny()
    model(batch(0))["loss"].backward()
    want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, order)

    def body(pm: ParallelModule, place: Place) -> Any:
        pm.train_step(mine(batch(0), place))
        return pm.clip_grad_norm_(0.1, order), pm.full_gradients()

    for norm, grads in on_ranks("dp=2,tp=2", body):
        torch.testing.assert_close(norm, want)
        agree(grads, {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("text", ["tp=1", "tp=2", "dp=2,tp=2", "dp=2,tp=1"])
@pytest.mark.parametrize("foreach", [False, True])
def test_the_clipping_of_torch_is_right_too(text: str, foreach: bool) -> None:
    model = tiny()
    model(batch(0))["loss"].backward()
    want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def body(pm: ParallelModule, place: Place) -> Any:
        pm.train_step(mine(batch(0), place))
        norm = torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.1, foreach=foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm, pm.full_gradients()

    for norm, grads in on_ranks(text, body):
        torch.testing.assert_close(norm, want)
        agree(grads, {n: p.grad for n, p in model.named_parameters()})


def test_freezing_and_unfreezing() -> None:
    model = tiny()

    def toggle(m: Any) -> None:
        by_name = dict(m.named_parameters())
        for name in ("layers.0.up.weight", "layers.1.scale"):
            by_name[name].requires_grad_(False)
        by_name["layers.0.frozen"].requires_grad_(True)

    toggle(model)
    model(batch(0))["loss"].backward()

    def body(pm: ParallelModule, place: Place) -> Any:
        toggle(pm)
        pm.train_step(mine(batch(0), place))
        return pm.full_gradients()

    for got in on_ranks("dp=2,tp=2", body):
        agree(got, {n: p.grad for n, p in model.named_parameters()})


def test_refusals() -> None:
    def body(pm: ParallelModule, place: Place) -> None:
        pm.train_step(batch())
        with pytest.raises(AutoparError, match="bad-norm"):
            pm.clip_grad_norm_(1.0, 0.0)
        with pytest.raises(AutoparError, match="fixed-module"):
            pm.half()
        assert pm.to("cpu") is pm
        for p in pm.parameters():
            p.requires_grad_(False)
        with pytest.raises(AutoparError, match="no-gradient"):
            pm.train_step(batch())

    on_ranks("tp=1", body)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("before", [False, True])
def test_compiles_each_kind_once(before: bool) -> None:
    pm = parallel(Place.alone(Mesh.parse("tp=1")))
    if before:
        pm.train_step(batch(0))
        pm.zero_grad()
    counter = CompileCounterWithBackend("eager")
    pm.compile(backend=counter)
    for step in range(2):
        pm.train_step(batch(step))
    agree(pm.full_gradients(), reference(2)[0])
    assert counter.frame_count == 1 + 2  # the layer; what is before and after its calls


def test_random_state_belongs_to_the_path_and_the_step() -> None:
    streams = Streams(3)
    calls = [Call(lambda x, rng: (x, rng), (), (None,), streams, f"layers.{i}") for i in range(2)]
    seeds = []
    for _ in range(2):
        streams.advance()
        seeds += [int(call((7,))[1].seed) for call in calls]
    assert len(set(seeds)) == 4
    assert int(calls[1]((7,))[1].seed) == seeds[3]


@pytest.mark.parametrize("text", ["tp=1", "dp=2,tp=2"])
def test_a_failed_call_leaves_nothing_behind(text: str) -> None:
    grads, _ = reference()

    def body(pm: ParallelModule, place: Place) -> Any:
        x = mine(batch(0), place)
        unit = pm.get_submodule("layers.1")
        hook = unit.register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            pm.train_step(x)
        hook.remove()
        loss = pm(x)["loss"]
        loss.register_hook(_fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
        leaf = x.clone().requires_grad_()
        leaf.register_hook(_fail)
        loss = pm(leaf)["loss"]
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
        pm.zero_grad()
        assert all(g is None for g in pm.full_gradients().values())
        pm.train_step(x)
        return pm.full_gradients()

    for got in on_ranks(text, body):
        agree(got, grads)


def _fail(*_: Any) -> None:
    raise RuntimeError("on purpose")


def test_the_engine_waits_for_the_first_gradient_and_keeps_the_parameters() -> None:
    grads, loss = reference()
    logits = tiny()(batch(0))["logits"].detach()

    def body(pm: ParallelModule, place: Place) -> None:
        before = dict(pm.named_parameters())
        memory = [p._local_tensor.data_ptr() for p in before.values()]  # type: ignore[attr-defined]
        with pytest.raises(AutoparError, match=r"does not support deepcopy.*\[copied-module\]"):
            copy.deepcopy(pm)
        with torch.no_grad():
            torch.testing.assert_close(pm(mine(batch(0), place))["logits"], mine(logits, place))
        assert not pm._engine.units and not any(p.grad is not None for p in before.values())
        with pm.no_sync():
            pm(mine(batch(0), place))["loss"].backward()
        assert pm._engine.units and all(p.grad is None or n.endswith("scale") for n, p in before.items())
        pm.zero_grad()
        torch.testing.assert_close(pm.train_step(mine(batch(0), place)), loss)
        agree(pm.full_gradients(), grads)
        after = dict(pm.named_parameters())
        assert all(after[n] is p for n, p in before.items())
        assert [p._local_tensor.data_ptr() for p in after.values()] == memory  # type: ignore[attr-defined]
        with pytest.raises(AutoparError, match=r"does not support deepcopy.*\[copied-module\]"):
            copy.deepcopy(pm)

    on_ranks("dp=2,tp=2", body)
