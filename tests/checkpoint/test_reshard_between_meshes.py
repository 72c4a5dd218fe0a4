"""Save on tp=2, dp=2 after two AdamW steps; load on other meshes, in stages too: the next step is the unsharded one."""

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

import autopar
from autopar.ir.mesh import Mesh
from tests.checkpoint.models import agree, moments
from tests.ranks import Ranks


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.n, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.n(x))))


class Net(nn.Module):
    """A vocabulary that no axis divides."""

    def __init__(self, vocabulary: int = 21, width: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss(out: Tensor) -> Tensor:
    return (out * torch.cos(torch.arange(out.shape[-1], dtype=out.dtype))).mean() + out.pow(2).mean()


def ids() -> Tensor:
    return torch.randint(0, 21, (4, 6), generator=torch.Generator().manual_seed(1))


def steps(module: Any, optimizer: Any, rows: Tensor, n: int) -> list[float]:
    out = []
    for _ in range(n):
        if isinstance(module, Net):
            total = loss(module(rows))
            total.backward()
        else:
            total = module.train_step(rows)
        out.append(float(total.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return out


def run(mesh: str, folder: pathlib.Path, before: int) -> Any:
    sizes = Mesh.parse(mesh)
    rows = ids().chunk(sizes.data_size)[sizes.data_rank(sizes.coordinates(dist.get_rank()))]
    pm = autopar.parallelize(net(seed=0 if before else 3), mesh, args=(rows,), loss=loss)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    if before:
        steps(pm, optimizer, rows, before)
        pm.save(folder, optimizer, step=before)
    else:
        assert pm.load(folder, optimizer)["step"] == 2
    state = pm.full_parameters(), moments(pm, optimizer)
    return (*state, steps(pm, optimizer, rows, 1), pm.full_parameters())


@pytest.mark.parametrize("mesh", ["tp=2,dp=2"])
def test_reshard_between_meshes(ranks: Ranks, mesh: str, tmp_path: pathlib.Path) -> None:
    model = net()
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, reference, ids(), 2)
    want = {n: p.detach().clone() for n, p in model.named_parameters()}
    states = moments(model, reference)
    after = steps(model, reference, ids(), 1)
    last = {n: p.detach() for n, p in model.named_parameters()}
    saved = ranks.run(4, run, mesh, tmp_path / "c", 2, timeout=120.0)
    for other in ("tp=2,dp=2", "pp=2,dp=2", "dp=4", "tp=1"):
        found = ranks.run(Mesh.parse(other).world, run, other, tmp_path / "c", 0, timeout=120.0)
        held = {name: moment[name] for _, moment, _, _ in found for name in moment}
        assert held.keys() == states.keys()  # in a pipeline each rank has those of its stages
        for params, moment, losses, end in found:
            agree(params, saved[0][0])
            agree(moment, {name: saved[0][1][name] for name in moment})
            agree(params, want, 1e-5)
            agree(moment, {name: states[name] for name in moment}, 1e-5)
            assert losses == pytest.approx(after, rel=1e-5)
            agree(end, last, 1e-4)
    metadata = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert {n: tuple(metadata[n].size) for n in want} == {n: tuple(p.shape) for n, p in want.items()}  # no padding
