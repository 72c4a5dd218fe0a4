"""The traced program computes what the model computes: outputs, loss, gradients, buffers."""

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparWarning
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.trace import Traced, trace
from autopar.trace.structure import scan
from tests.trace.models import CASES

MESH = Mesh.parse("dp=1,tp=2")


def to_double(value: Any) -> Any:
    """Float tensors of a nest in double precision."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: to_double(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_double(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return tuple(map(to_double, value)) if isinstance(value, tuple) else value


def leaves(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    scan(value, found, lambda v: None)
    return found


def values_of(traced: Traced, model: nn.Module) -> dict[str, Tensor]:
    """Fresh leaves for each parameter and buffer of the program."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    params = traced.program.params
    leaves = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}
    return {n: traced.constants[n] if p.kind == "constant" else leaves[n] for n, p in params.items()}


def close(mine: Tensor, theirs: Tensor, name: str, least: float = 1e-30) -> None:
    """Equal relative to the largest value, or to ``least`` where that is larger (gradients that are only rounding)."""
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, name
    if not theirs.is_floating_point():
        assert torch.equal(mine, theirs), name
        return
    scale = theirs.detach().abs().max().clamp_min(least)
    error = ((mine - theirs).detach().abs().max() / scale).item()
    assert error < 2e-6, f"{name}: {error:.2e}"


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_program_equals_model(name: str, train: bool) -> None:
    model, args, kwargs, loss = CASES[name]()
    model.double().train(train)
    args, kwargs = to_double(args), to_double(kwargs)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)
        traced = trace(model, args, kwargs, mesh=MESH, loss=loss, train=train)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    program = traced.program
    values = values_of(traced, model)
    got = evaluate(program, values, traced.structure.flatten(args, kwargs))
    pairs = list(zip(program.outputs, got))
    by_kind = {kind: [(o, t) for o, t in pairs if o.kind == kind] for kind in ("user", "loss", "buffer")}
    reference = copy.deepcopy(model)
    if hasattr(reference, "config"):
        reference.config.use_cache = False
    expected = reference(*args, **kwargs)
    user = [t for _, t in by_kind["user"]]
    for i, (mine, theirs) in enumerate(zip(user, leaves(expected), strict=True)):
        close(mine, theirs, f"output {i}")
    assert type(traced.structure.rebuild(user)) is type(expected)
    for out, mine in by_kind["buffer"]:
        close(mine, reference.get_buffer(out.name), out.name)
    (mine,) = [t for _, t in by_kind["loss"]]
    theirs = loss(expected) if loss else expected.loss
    close(mine, theirs, "loss")
    mine.backward()
    theirs.backward()
    least = 1e-6 * max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    for path, param in reference.named_parameters():
        if param.grad is None:
            assert values[path].grad is None, path
        else:
            assert values[path].grad is not None, path
            close(values[path].grad, param.grad, path, least)
