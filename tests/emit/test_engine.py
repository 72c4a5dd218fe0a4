"""Gradient sync and checkpoints on real gloo processes."""

import os
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.emit.module import ParallelModule
from autopar.emit.params import Place
from autopar.emit.segmented import SegmentedDTensor
from autopar.ir.mesh import Mesh
from tests.emit.tiny import batch, mine, parallel, tiny

FIRST, SECOND = "dp=2,tp=2", "dp=1,tp=3"


def check(pm: ParallelModule, steps: list[int], tag: str) -> None:
    """Gradients of the sum of the losses of ``steps``, against the unsharded model."""
    model = tiny()
    for step in steps:
        model(batch(step))["loss"].backward()
    for (name, want), got in zip(model.named_parameters(), pm.full_gradients().values()):
        assert (got is None) == (want.grad is None), (tag, name)
        if got is not None:
            torch.testing.assert_close(got, want.grad, rtol=1e-10, atol=1e-12, msg=f"{tag}: {name}")
    pm.zero_grad()


def gradients(pm: ParallelModule, place: Place) -> None:
    """Every order of forwards and backwards gives exactly the sum."""
    x = [mine(batch(i), place) for i in range(4)]
    pm.train_step(x[0])
    kinds = {type(p.grad) for p in pm.parameters() if p.grad is not None}
    assert kinds <= {DTensor, SegmentedDTensor} and SegmentedDTensor in kinds
    check(pm, [0], "one step")
    (pm(x[0])["loss"] + pm(x[1])["loss"]).backward()
    check(pm, [0, 1], "two forwards, one backward")
    one, two = pm(x[0])["loss"], pm(x[1])["loss"]
    one.backward()
    two.backward()
    check(pm, [0, 1], "two forwards, two backwards")
    with torch.no_grad():
        pm(x[2])
    one = pm(x[0])["loss"]
    with torch.inference_mode():
        pm(x[2])
    pm(x[3])
    one.backward()
    pm.train_step(x[1])
    check(pm, [0, 1], "accumulation, with forwards that nobody differentiates between")
    pm.eval()
    pm.train_step(x[0])
    pm.train()
    check(pm, [0], "eval mode")
    leaf = x[0].clone().requires_grad_()
    pm(leaf)["loss"].backward()
    assert leaf.grad is not None
    check(pm, [0], "an input with a gradient")


def states(pm: ParallelModule, place: Place) -> dict[str, Any]:
    """Parameters and Adam's first moments after one step."""
    opt = torch.optim.AdamW(pm.parameters(), lr=0.1)
    names = {id(p): n for n, p in pm.named_parameters()}
    pm.train_step(mine(batch(0), place))
    opt.step()
    pm.zero_grad()
    return {"model": pm.state_dict(), "moments": {names[id(p)]: s["exp_avg"] for p, s in opt.state.items()}}


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {f"{part}.{n}": t for part, named in state.items() for n, t in named.items()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def loads(pm: ParallelModule, place: Place, folder: str, alone: bool = False) -> None:
    """What another mesh saved, optimizer state included, is what this mesh computes itself."""
    state = states(pm, place)
    want = whole(state)
    with torch.no_grad():
        for named in state.values():
            for t in named.values():
                t.zero_()
    dcp.load(state, checkpoint_id=pathlib.Path(folder) / "saved", no_dist=alone)
    for name, value in whole(state).items():
        torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-12, msg=name)


def process(rank: int, text: str, folder: str) -> None:
    """On the first mesh: gradients, and save a checkpoint; on the second, load it."""
    torch.set_num_threads(1)
    mesh = Mesh.parse(text)
    store = dist.FileStore(os.path.join(folder, text), mesh.world)
    dist.init_process_group("gloo", rank=rank, world_size=mesh.world, store=store)
    place = Place.of(mesh, "cpu")
    if text == FIRST:
        gradients(parallel(place), place)
        dcp.save(states(parallel(place), place), checkpoint_id=pathlib.Path(folder) / "saved")
    else:
        loads(parallel(place), place, folder)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_gradients_are_summed_and_checkpoints_go_to_other_meshes(tmp_path: pathlib.Path) -> None:
    for text in (FIRST, SECOND):
        mp.spawn(process, (text, str(tmp_path)), Mesh.parse(text).world)
    place = Place.alone(Mesh.parse("dp=1,tp=1"))
    loads(parallel(place), place, str(tmp_path), alone=True)
