"""Models on the meta device, and models with weights: what the shards are made of."""

import pytest
import torch
from torch import Tensor, nn

from autopar.emit.initial import materialise
from autopar.emit.params import Place, initialise, local_of, shard_of
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.runtime.simulate import device_mesh, run_ranks
from tests.emit.tiny import DTYPE, WIDTH, Tiny, parallel, table, tiny


def make(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    return dict(materialise(model, {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}, seed))


class Rooted(nn.Module):
    """Its own tensors and a child's are made by it: what a model's ``_init_weights`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.proj = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("places", torch.arange(4), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rooted):
            nn.init.normal_(module.token, 5.0)
            module.places.copy_(torch.arange(4))
            nn.init.constant_(module.proj.bias, 7.0)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm1d):
            module.reset_parameters()


def test_initialisers_of_the_model_run_innermost_first() -> None:
    with torch.device("meta"):
        model = Rooted()
    before = {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    got = make(model)
    assert got["proj.bias"].tolist() == [7.0] * 3 and got["places"].tolist() == [0, 1, 2, 3]
    assert got["norm.running_var"].tolist() == [1.0] * 3 and got["norm.num_batches_tracked"] == 0
    assert got["token"].mean() > 2
    assert {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]} == before
    assert all(t.is_meta for t in model.parameters())


def test_streams_depend_on_path_and_seed_only() -> None:
    with torch.device("meta"):
        model, longer = (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))),
        )
    state = torch.get_rng_state()
    one, two, three = make(model), make(longer), make(model, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one["1.weight"], two["1.weight"]) and not torch.equal(one["1.weight"], one["0.weight"])
    assert not torch.equal(one["1.weight"], three["1.weight"])


class Silent(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Module()
        if name == "parameter":
            self.inner.token = nn.Parameter(torch.zeros(3))
        else:
            self.inner.register_buffer("token", torch.zeros(3, dtype=torch.bool if name == "bool" else torch.float32))


@pytest.mark.parametrize(
    "name, slug", [("parameter", "meta-initialiser"), ("bool", "meta-buffer"), ("float", "meta-buffer")]
)
def test_tensors_that_nothing_fills_are_refused(name: str, slug: str) -> None:
    with torch.device("meta"):
        model = Silent(name)
    with pytest.raises(AutoparError, match="inner.token: Module on the meta device") as error:
        make(model)
    assert error.value.slug == slug


class Resets(Tiny):
    """``Tiny`` with an initialiser for what its own modules hold."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
            return
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)
        for b in module.buffers(recurse=False):
            nn.init.zeros_(b)


def test_meta_weights_are_the_same_on_every_mesh() -> None:
    with torch.device("meta"):
        model = Resets()

    def whole(text: str) -> dict[str, Tensor]:
        mesh = Mesh.parse(text)
        return run_ranks(mesh, lambda _: parallel(Place.of(mesh, device_mesh(mesh)), model).full_parameters())[-1]

    one, four = whole("tp=1"), whole("dp=2,tp=2")
    for name, value in one.items():
        assert torch.equal(value, four[name]) and value.isfinite().all()


def test_real_weights_are_copied_and_meta_shards_hold_nothing() -> None:
    mesh, model = Mesh.parse("dp=1,tp=1"), tiny()
    place, params = Place.alone(mesh), table(mesh)
    got = initialise(model, params, place)
    for name, param in params.items():
        whole = dict(model.named_parameters()).get(name, model.count)
        assert torch.equal(shard_of(got[name]), local_of(whole, param, mesh, place.at))
        assert shard_of(got[name]).data_ptr() != whole.data_ptr()
    assert all(t.is_meta for t in initialise(model, params, place, device=torch.device("meta")).values())
    assert got["layers.0.gain"].dtype == DTYPE and got["layers.0.gain"].shape == (WIDTH,)
