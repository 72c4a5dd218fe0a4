import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.runtime import collectives as c
from autopar.runtime.axis import axes_of, device_mesh_of
from autopar.runtime.simulate import device_mesh, run_ranks


@pytest.mark.parametrize("given", ["user", "split"])
def test_handles_of_split_axes(given: str) -> None:
    mesh = Mesh.parse("dp=2,tp=4").split("tp", 2)

    def rank(r: int) -> dict[str, list[int]]:
        over = device_mesh(Mesh.parse("dp=2,tp=4")) if given == "user" else device_mesh(mesh)
        axes = axes_of(mesh, over)
        here = mesh.coordinates(r)
        assert {a: axes[a].coordinate for a in mesh.names} == here
        assert axes["tp"].coordinate == 2 * here["tp0"] + here["tp1"]
        assert {a: h.size for a, h in axes.items()} == {"dp": 2, "tp0": 2, "tp1": 2, "tp": 4}
        return {a: c.all_gather(torch.tensor([r]), 0, h).tolist() for a, h in axes.items()}

    ranks = run_ranks(mesh, rank)
    assert ranks[0] == {"dp": [0, 4], "tp0": [0, 2], "tp1": [0, 1], "tp": [0, 1, 2, 3]}
    assert ranks[7] == {"dp": [3, 7], "tp0": [5, 7], "tp1": [6, 7], "tp": [4, 5, 6, 7]}


def test_keeps_the_groups_of_the_users_mesh() -> None:
    def rank(r: int) -> bool:
        user = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        split = device_mesh_of(Mesh.parse("dp=2,tp=2").split("tp", 2), user)
        return split.mesh_dim_names == ("dp", "tp0", "tp1") and split.get_group("dp") is user.get_group("dp")

    assert run_ranks(4, rank) == [True] * 4


@pytest.mark.parametrize("text", ["tp=4", "dp=4,tp=1", "tp=2,dp=2"])
def test_refuses_another_mesh(text: str) -> None:
    def rank(r: int) -> str:
        user = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(AutoparError) as error:
            axes_of(Mesh.parse(text), user)
        dist.barrier()
        return error.value.slug

    assert run_ranks(4, rank) == ["bad-mesh"] * 4
