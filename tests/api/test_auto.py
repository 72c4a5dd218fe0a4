"""strategy="auto": whatever is chosen runs on real processes and equals the unsharded model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from tests.api.models import Mlp, seeded
from tests.experts.models import deepseek
from tests.llama import llama
from tests.ranks import Ranks

RANKS, ROWS, LENGTH = 4, 8, 16  # rows of the global batch


def whole(width: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, width, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def model(name: str) -> Any:
    return deepseek().float() if name == "experts" else llama(layers=4)


def mine(mesh: Mesh) -> dict[str, torch.Tensor]:
    """This data rank's rows."""
    place = mesh.data_rank(mesh.coordinates(dist.get_rank()))
    return {n: t.chunk(mesh.data_size)[place].clone() for n, t in whole(64).items()}


def chosen(name: str, mesh: Any, strategy: str, ways: int = 1) -> dict[str, Any]:
    """What is decided, and two steps of it."""
    if mesh == "1d":
        mesh = init_device_mesh("cpu", (RANKS,))
    if mesh == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    example = {n: t[: ROWS // RANKS * ways] for n, t in whole(64).items()}
    pm = autopar.parallelize(model(name), mesh, kwargs=example, strategy=strategy)
    plan = pm.plan
    rows = mine(Mesh.parse(plan.mesh))
    loss = pm.train_step(**rows)
    grads = pm.full_gradients()
    few = {n: t[: len(t) // 2] for n, t in rows.items()}  # other rows than those planned for
    return {
        "mesh": plan.mesh, "strategy": plan.strategy, "text": plan.explain(), "loss": float(loss), "grads": grads,
        "rows": plan.rows, "few": float(pm.train_step(**few)) if len(rows["labels"]) > 1 else 0.0,
    }  # fmt: skip


def plain(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    m = model(name)
    out = m(**whole(64))
    out.loss.backward()
    return float(out.loss.detach()), {n: p.grad for n, p in m.named_parameters() if p.grad is not None}


CASES = [
    ("llama", None, "auto", 1),
    ("llama", 4, "auto,zero=3,recompute=full", 1),
    ("llama", "1d", "auto", 1),
    ("llama", "2d", "auto", 2),
    ("llama", "pp=2", "auto", 1),
    ("llama", {"pp": 4}, "auto", 4),
    ("llama", "cp=2", "auto,context_parallel=ulysses", 1),
    ("llama", "cp=2,tp=2", "auto", 4),
    ("experts", "ep=2", "auto", 1),
]


@pytest.mark.parametrize(("name", "mesh", "strategy", "ways"), CASES)
def test_what_is_chosen_equals_the_unsharded_model(
    ranks: Ranks, name: str, mesh: Any, strategy: str, ways: int
) -> None:
    found = ranks.run(RANKS, chosen, name, mesh, strategy, ways, timeout=240.0)
    loss, grads = plain(name)
    assert len({(f["mesh"], f["strategy"], f["rows"]) for f in found}) == 1
    sizes = Mesh.parse(found[0]["mesh"])
    assert sizes.world == RANKS
    wanted = {"2d": {"dp": 2, "tp": 2}, "1d": {}, None: {}, 4: {}}
    for axis, size in (dict(Mesh.parse(mesh).axes) if isinstance(mesh, str) and "=" in mesh else
                       mesh if isinstance(mesh, dict) else wanted[mesh]).items():  # fmt: skip
        assert sizes.size(axis) == size
    assert all(word in found[0]["strategy"] for word in strategy.split(",")[1:])
    assert "neighbours" in found[0]["text"] and found[0]["rows"] == ROWS
    for f in found:
        assert f["loss"] == pytest.approx(loss, rel=1e-5)
        assert f["few"] == 0.0 or f["few"] > 0
        assert f["grads"].keys() == grads.keys()
        for n, g in grads.items():
            assert torch.allclose(f["grads"][n], g, rtol=1e-4, atol=1e-5 * float(g.abs().max())), n


def test_without_auto_there_is_no_plan() -> None:
    """A module of the model's own that is called so is that."""
    x = torch.randn(4, 16)
    for pm in (autopar.parallelize(seeded(Mlp), "dp=1", (x,)), autopar.parallelize(seeded(Mlp), "dp=1")):
        assert pm.plan is None
        with pytest.raises(AttributeError, match="plans"):
            pm.plans  # noqa: B018
    own = torch.nn.Sequential()
    own.add_module("plan", torch.nn.Linear(16, 2))
    assert autopar.parallelize(own, "dp=1", (x,)).plan.weight.shape == (2, 16)


def test_auto_needs_an_example() -> None:
    with pytest.raises(AutoparError) as error:
        autopar.parallelize(seeded(Mlp), strategy="auto")
    assert error.value.slug == "input-structure"


def test_auto_is_for_all_processes() -> None:
    x = torch.randn(4, 16)
    with pytest.raises(AutoparError) as error:
        autopar.parallelize(seeded(Mlp), 8, (x,), strategy="auto")
    assert error.value.slug == "bad-mesh"
    with pytest.raises(AutoparError) as error:
        autopar.parallelize(seeded(Mlp), None, (x,))
    assert error.value.slug == "bad-mesh"


def failing(strategy: str) -> str:
    try:
        autopar.parallelize(llama(), None, kwargs=whole(64), strategy=strategy)
    except AutoparError as error:
        return error.slug
    return "none"


def test_a_refusal_reaches_every_process(ranks: Ranks) -> None:
    assert ranks.run(2, failing, "auto,schedule=dualpipev", timeout=120.0) == ["bad-strategy"] * 2


def features(rows: int) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(5))


def without_layers() -> tuple[float, str, str]:
    pm = autopar.parallelize(seeded(Mlp), None, (features(4),), strategy="auto", loss=torch.Tensor.sum)
    mesh = Mesh.parse(pm.plan.mesh)
    rows = features(8).chunk(mesh.data_size)[mesh.data_rank(mesh.coordinates(dist.get_rank()))]
    return float(pm.train_step(rows)), pm.plan.mesh, pm.plan.summary


def test_a_model_without_layers_is_planned_and_says_what_is_left_out(ranks: Ranks) -> None:
    (loss, mesh, summary), other = ranks.run(2, without_layers, timeout=120.0)
    expected = float(seeded(Mlp)(features(8)).detach().sum())
    assert loss == pytest.approx(expected, rel=1e-5) and other[0] == pytest.approx(loss)
    assert Mesh.parse(mesh).size("pp") == 1 and "no plan has stages (pp)" in summary
