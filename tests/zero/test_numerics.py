"""ZeRO against the unsharded model, all ranks in one process: every stage, mesh and kind of parameter."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.emit.module import ParallelModule
from autopar.emit.params import Place
from autopar.emit.segmented import SegmentedDTensor
from autopar.passes.zero import Zero
from tests.emit.test_module import agree, reference
from tests.emit.tiny import batch, mine, tiny
from tests.zero.tiny import on_ranks

# dp=3 and dp=4 leave ranks with fewer rows, or none; tp=2 cuts five rows unevenly, in two segments of one weight.
MESHES = ["dp=2,tp=1", "dp=4,tp=1", "dp=2,tp=2", "tp=2,dp=3", "dp=2,ep=2,tp=2", "dp=2,tp=4/2"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("text", MESHES)
def test_steps_and_calls_give_the_sum(text: str, stage: int) -> None:
    """Gradients of a step, of two losses at once, of two backwards with another forward between."""
    grads, _ = reference(2)
    once, loss = reference()

    def body(pm: ParallelModule, place: Place) -> Any:
        torch.testing.assert_close(pm.train_step(mine(batch(0), place)), loss)
        out = [pm.full_gradients()]
        assert all(type(p.grad) in (DTensor, SegmentedDTensor) for p in pm.parameters() if p.grad is not None)
        pm.zero_grad()
        ids = [id(p) for p in pm.parameters()]
        (pm(mine(batch(0), place))["loss"] + pm(mine(batch(1), place))["loss"]).backward()
        out.append(pm.full_gradients())
        pm.zero_grad()
        one, two = pm(mine(batch(0), place))["loss"], pm(mine(batch(1), place))["loss"]
        with torch.no_grad():
            pm(mine(batch(2), place))
        one.backward()
        two.backward()
        out.append(pm.full_gradients())
        assert ids == [id(p) for p in pm.parameters()]
        return out

    for first, *others in on_ranks(text, Zero(stage), body):
        agree(first, once)
        for got in others:
            agree(got, grads)


def trained(optimizer: dict[str, bool]) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = tiny()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **optimizer)
    norms = []
    for step in range(3):
        opt.zero_grad()
        model(batch(step))["loss"].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7))
        opt.step()
    return {n: p.detach() for n, p in model.named_parameters()}, norms


@pytest.mark.parametrize(
    "zero", [Zero(1), Zero(2), Zero(3, prefetch=1), Zero(3, shard=2), Zero(3, offload="cpu")], ids=str
)
@pytest.mark.parametrize("text", ["dp=4,tp=1", "dp=2,tp=2", "dp=4,tp=2"])
@pytest.mark.parametrize("foreach", [False, True])
def test_adamw_and_both_clippings_equal_the_model(text: str, zero: Zero, foreach: bool) -> None:
    params, norms = trained({"foreach": foreach})

    def body(pm: ParallelModule, place: Place) -> Any:
        opt = torch.optim.AdamW(pm.parameters(), lr=0.1, weight_decay=0.1, foreach=foreach)
        seen = []
        for step in range(3):
            opt.zero_grad()
            pm.train_step(mine(batch(step), place))
            if step == 1:
                norm = torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.7, foreach=foreach)
                seen.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            else:
                seen.append(pm.clip_grad_norm_(0.7))
            opt.step()
        return pm.full_parameters(), seen

    for got, seen in on_ranks(text, zero, body):
        agree(got, params)  # type: ignore[arg-type]
        torch.testing.assert_close(seen, norms)


@pytest.mark.parametrize("order", [1.0, 3.0, float("inf")])
def test_other_norms_count_each_element_once(order: float) -> None:
    model = tiny()
    model(batch(0))["loss"].backward()
    want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, order)

    def body(pm: ParallelModule, place: Place) -> Any:
        pm.train_step(mine(batch(0), place))
        return pm.clip_grad_norm_(0.1, order)

    for zero in (Zero(2), Zero(3, shard=2)):
        for norm in on_ranks("dp=4,tp=2", zero, body):
            torch.testing.assert_close(norm, want)


@pytest.mark.parametrize("zero", [Zero(1), Zero(3), Zero(3, shard=2)], ids=str)
@pytest.mark.parametrize("text", ["dp=4,tp=1", "dp=4,tp=2"])
def test_states_go_out_and_in(text: str, zero: Zero) -> None:
    """``state_dict`` whole is the model's, and both a whole and a sharded one come back, also after a step."""
    state = tiny().state_dict()

    def whole(t: Tensor) -> Tensor:
        return t.full_tensor() if isinstance(t, DTensor) else t

    def body(pm: ParallelModule, place: Place) -> Any:
        first = {n: whole(t).clone() for n, t in pm.state_dict().items()}
        doubled = {n: 2 * t for n, t in state.items()}
        pm.load_state_dict(doubled)
        second = {n: whole(t).clone() for n, t in pm.state_dict().items()}
        pm.train_step(mine(batch(0), place))
        pm.load_state_dict({n: t.detach().clone() for n, t in pm.state_dict().items()})
        pm.load_state_dict(state)
        pm.zero_grad()
        pm.train_step(mine(batch(0), place))
        return first, second, pm.full_gradients()

    for first, second, grads in on_ranks(text, zero, body):
        agree(first, state)
        agree(second, {n: 2 * t for n, t in state.items()})
        agree(grads, reference()[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_sync_gradients_wait(stage: int) -> None:
    grads, _ = reference(2)

    def body(pm: ParallelModule, place: Place) -> Any:
        held = [p for n, p in pm.named_parameters() if p.dim()]
        with pm.no_sync():
            pm.train_step(mine(batch(3), place))
        pm.zero_grad()
        with pm.no_sync():
            pm.train_step(mine(batch(0), place))
        assert all(p.grad is None for p in held)
        pm.train_step(mine(batch(1), place))
        steps = pm.full_gradients()
        pm.zero_grad()
        with pm.no_sync():
            pm(mine(batch(0), place))["loss"].backward()
        assert all(p.grad is None for p in held)
        pm(mine(batch(1), place))["loss"].backward()
        return steps, pm.full_gradients()

    for steps, calls in on_ranks("dp=2,tp=2", Zero(stage), body):
        agree(steps, grads)
        agree(calls, grads)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_changes_nothing(policy: str, stage: int) -> None:
    grads, _ = reference(2)

    def body(pm: ParallelModule, place: Place) -> Any:
        one, two = pm(mine(batch(0), place))["loss"], pm(mine(batch(1), place))["loss"]
        two.backward()
        one.backward()
        calls = pm.full_gradients()
        pm.zero_grad()
        pm.train_step(mine(batch(0), place))
        pm.train_step(mine(batch(1), place))
        return calls, pm.full_gradients()

    for calls, steps in on_ranks("dp=2,tp=2", Zero(stage), body, policy):
        agree(calls, grads)
        agree(steps, grads)


@pytest.mark.parametrize("zero", [Zero(1), Zero(3)], ids=str)
def test_a_failed_call_leaves_nothing_behind(zero: Zero) -> None:
    grads, _ = reference()

    def body(pm: ParallelModule, place: Place) -> Any:
        ids = [id(p) for p in pm.parameters()]
        with pytest.raises(RuntimeError):
            pm.train_step(torch.zeros(2, 3, dtype=torch.float64))
        assert ids == [id(p) for p in pm.parameters()]
        out = pm(mine(batch(1), place))["loss"]
        out.register_hook(_fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            out.backward()
        assert ids == [id(p) for p in pm.parameters()]
        pm.train_step(mine(batch(0), place))
        return pm.full_gradients()

    for got in on_ranks("dp=2,tp=2", zero, body):
        agree(got, grads)


def _fail(_: Tensor) -> None:
    raise RuntimeError("on purpose")


def test_ranks_keep_their_share_alone() -> None:
    """Elements of every rank add up to the whole once, and none has the whole of what can be cut."""

    def body(pm: ParallelModule, place: Place) -> Any:
        return {n: p.to_local().numel() for n, p in pm.named_parameters()}  # type: ignore[attr-defined]

    whole = {n: p.numel() for n, p in tiny().named_parameters()}
    found = on_ranks("dp=2,tp=2", Zero(3), body)
    for name, count in whole.items():
        total = sum(f[name] for f in found)
        twice = not any(key in name for key in ("up.", "down."))
        repeated = 4 if name.endswith("scale") else 2 if twice else 1
        assert total == repeated * count, name


def test_evaluation_gathers_one_unit_at_a_time() -> None:
    """Under ``no_grad`` at stage 3 a unit's parameters are freed before the next unit's are gathered."""

    def body(pm: ParallelModule, place: Place) -> Any:
        seen: list[int] = []
        units = list(pm._engine.units[:-1])
        held = [[p for g in u._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params] for u in units]  # type: ignore[operator]

        def look(*_: Any) -> None:
            full = [any(o.untyped_storage().size() for p in h for o in p.all_gather_outputs) for h in held]
            seen.append(sum(full))

        for unit in units:
            unit.register_forward_pre_hook(look)
        pm.eval()
        with torch.no_grad():
            pm(mine(batch(0), place))
            seen.clear()
            pm(mine(batch(0), place))
        return seen

    assert all(max(seen) == 1 and len(seen) == 2 for seen in on_ranks("dp=2,tp=1", Zero(3), body))
