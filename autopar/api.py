"""parallelize: every stage on one screen."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.auto import decided, wants
from autopar.checkpoint.live import Peers
from autopar.checkpoint.safetensors import Weights, read_or_make
from autopar.compile import Compiler, Variant
from autopar.emit.across import Across
from autopar.emit.deferred import Deferred
from autopar.emit.module import ParallelModule
from autopar.emit.named import Container, settings_of
from autopar.emit.params import Place, initialise
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.modules import named, walk
from autopar.ir.placement import Placement
from autopar.ir.program import Param
from autopar.runtime.agreement import Agreement
from autopar.runtime.garbage import uncollected
from autopar.runtime.heartbeat import PATIENCE, guard, start
from autopar.runtime.random import Streams
from autopar.strategy import Strategy
from autopar.trace.blueprint import blueprint


@uncollected()
def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | str | Mapping[str, int] | int | None = None,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    batch_dims: Any = None,
    strategy: Strategy | str | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    weights: Weights | str | os.PathLike[str] | None = None,
    heartbeat: float | None = PATIENCE,
    placement: Mapping[str, Placement] | None = None,
) -> ParallelModule:
    """A module that computes on ``mesh`` what ``model`` computes on the global batch. Collective.

    Args:
        model: any module; it is read, never changed. Its weights may be on the meta device.
        mesh: a DeviceMesh with axis names among pp, dp, ep, cp, tp, or sizes by axis as text, "dp=2,tp=4", or as a
            dict. With strategy="auto" also None or their number for all processes, a DeviceMesh of one dim, or sizes of
            some axes, to which the others are chosen.
        args, kwargs: this rank's example inputs, as in ``torch.export``; the model's own ``dummy_inputs`` where
            absent; a model without them is compiled at its first call.
        loss: from the model's output to a scalar; by default the output's ``loss``, or a scalar output.
        batch_dims: batch dim of each input by dotted name or in order; by default dim 0 of all as long as the first, as
            found at the first call that has the input.
        strategy: a Strategy, its text, or "auto": axes and strategy that ``plan`` finds fastest among those that fit
            and compile, for a global batch of the example's rows on every process (on every data rank where ``mesh``
            says all axes). Fields behind it are kept or refused: "auto,zero=3". ``pm.plan`` says what and why; data
            ranks then share the rows of that batch.
        seed: of random streams (dropout), and of initial weights that are on the meta device.
        device: where this rank's shards are put, by default the mesh's; "meta" allocates nothing.
        weights: a folder of safetensors files from which each rank reads its own slices, instead of the model's values.
        heartbeat: seconds without a sign of life after which a process counts as dead: the others raise AutoparError
            ``dead-rank``, or end with it on stderr where they hang in a collective. None: no watch is kept.
        placement: which ranks of ep hold which experts, by path of the layer, as ``place_experts`` makes it of
            ``expert_load``; in order where a layer has none. State dicts and checkpoints do not depend on it.

    Raises:
        AutoparError: with a slug, before any collective but an exchange of hashes and row counts.
    """
    decision = None
    _check_model(model)
    if wants(strategy):
        decision, (args, kwargs) = decided(model, mesh, example_of(model, args, kwargs), str(strategy), loss)
        mesh = mesh if isinstance(mesh, DeviceMesh) and mesh.ndim > 1 else decision.mesh
        strategy = decision.strategy
    strategy = Strategy.of(strategy)
    sizes, over = resolve(mesh, next((p.device.type for p in model.parameters()), "cpu"))
    agreement = Agreement.over(sizes, tuple(over.mesh.flatten().tolist()) if over is not None else (0,))
    rank = agreement.ranks.index(dist.get_rank()) if over is not None else 0
    hollow = blueprint(model) if any(p.is_meta for p in model.parameters()) else None
    compiler = Compiler(
        model, sizes, strategy, at=lambda m: m.coordinates(rank), agree=agreement, loss=loss, batch_dims=batch_dims,
        placement=placement,
    )  # fmt: skip
    compiler.model = hollow or model
    peers = Peers(agreement, rank)
    heart = start(agreement.group, agreement.ranks, peers.gather, heartbeat)

    @uncollected()
    @guard(heart)
    def build(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParallelModule:
        first = compiler.example(args, kwargs, model.training)
        place = Place.of(first.program.mesh, over) if over is not None else Place.alone(first.program.mesh)
        across = Across.of(first.program, place)
        tensors = _tensors(model, first, across, peers, seed=seed, device=device, weights=weights)
        compiler.model = hollow or blueprint(model)
        handles = {**place.axes, "rng": Streams(seed)}
        module = ParallelModule(compiler, first.program, place, tensors, handles, placement)
        module._heart = heart
        if decision is not None:
            module.__dict__["plan"] = decision
        mirror(module, model)
        tree = module._skeleton.root  # not the module: it holds the compiler, and groups end with the last reference
        compiler.modes = lambda: {n: m.training for n, m in named(tree).items()}
        return module

    example = example_of(model, args, kwargs)
    if example is None:
        return Deferred(build, model.training, settings_of(model))
    return build(*example)


def _check_model(model: nn.Module) -> None:
    """Raises AutoparError ``wrapped-model`` for what is no plain model: wrapped, scripted or parallel already."""
    kind = type(model).__name__
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise AutoparError("wrapped-model", f"{kind} shares out rows itself", "pass the model inside, its .module")
    if isinstance(model, torch.jit.ScriptModule):
        raise AutoparError("wrapped-model", f"{kind} is a compiled program", "pass the module that it was made of")
    if any(issubclass(k, DTensor) for k in {type(p) for _, m in walk(model) for p in m._parameters.values()}):
        why = f"parameters of {kind} are DTensors: the model is parallel already"
        raise AutoparError("wrapped-model", why, "pass the model as it was before parallelize, fully_shard or the like")


def _tensors(
    model: nn.Module,
    variant: Variant,
    across: Across,
    peers: Peers,
    *,
    seed: int,
    device: torch.device | str | None,
    weights: Weights | str | os.PathLike[str] | None,
) -> dict[str, Tensor]:
    """This rank's parts of the parameters that it holds, and its buffers: from a folder, or the model's own."""
    where = torch.device(device) if device is not None else None

    def own(params: Mapping[str, Param]) -> dict[str, Tensor]:
        return initialise(model, params, across.place, variant.constants, where, seed)

    if weights is None or (where is not None and where.type == "meta"):
        return own(across.held())
    every, held = variant.program.params, across.held()
    return peers.agreed(
        "weights", lambda: read_or_make(Weights.of(weights), model, every, across.place, where, own, held)
    )


def mirror(module: ParallelModule, model: nn.Module) -> None:
    """Give the parallel module a place for each of the model's modules: in order, in its mode, with settings fixed."""
    named: dict[str, nn.Module] = {"": module}
    classes: dict[type, frozenset[str]] = {}
    known: dict[Any, frozenset[str]] = {}  # settings by what equal layers have in common
    places: dict[int, nn.Module] = {}  # by the module that they stand for, which may have several names
    for name, original in walk(model):
        if name:
            path, _, last = name.rpartition(".")
            children: dict[str, Any] = named[path]._modules
            children[last] = named[name] = children.pop(last, None) or places.get(id(original)) or Container()
        here = named[name]
        places.setdefault(id(original), here)
        state = vars(here)
        state["training"] = original.training
        alike = (type(original), type(here), *vars(original), None, *original._modules)
        if alike not in known:
            known[alike] = settings_of(original, classes) - state.keys() - frozenset(dir(type(here)))
        state["_compiled"] = known[alike]


def resolve(mesh: DeviceMesh | str | Mapping[str, int] | int | None, device: str) -> tuple[Mesh, DeviceMesh | None]:
    """The mesh's sizes, and its DeviceMesh (None for one rank alone). Raises AutoparError ``bad-mesh``."""
    if mesh is None or isinstance(mesh, int):
        raise AutoparError("bad-mesh", f"mesh {mesh} names no axes", 'write "dp=2,tp=4", or strategy="auto"')
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if not names:
            fix = "init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
            raise AutoparError("bad-mesh", "the DeviceMesh has no axis names", fix)
        return Mesh.of(dict(zip(names, mesh.mesh.shape))), mesh
    sizes = Mesh.of(mesh) if isinstance(mesh, Mapping) else Mesh.parse(mesh)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if sizes.world != world:
        started = "" if dist.is_initialized() else " (torch.distributed is not initialized)"
        raise AutoparError(
            "bad-mesh",
            f"mesh {sizes} has {sizes.world} ranks (product of the axes), the world size is {world}{started}",
            f"choose axes whose product is {world}, or start {sizes.world} processes with torchrun",
        )  # fmt: skip
    if not dist.is_initialized():
        return sizes, None
    device = "cpu" if device in ("cpu", "meta") and not torch.accelerator.is_available() else device
    kind = device if device != "meta" else str(torch.accelerator.current_accelerator() or "cpu")
    return sizes, init_device_mesh(kind, tuple(n for _, n in sizes.axes), mesh_dim_names=sizes.names)


def example_of(
    model: nn.Module, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """The example inputs, or the model's own ``dummy_inputs``; None where there are neither."""
    if args is not None or kwargs is not None:
        if not isinstance(args, (tuple, list, type(None))) or not isinstance(kwargs, (Mapping, type(None))):
            why = f"args is a {type(args).__name__}, kwargs a {type(kwargs).__name__}"
            raise AutoparError(
                "input-structure", why, "args=(tensor, ...), kwargs={'name': tensor}, as in torch.export"
            )
        return tuple(args or ()), dict(kwargs or {})
    own = getattr(model, "dummy_inputs", None)
    return ((), own) if isinstance(own, Mapping) else None
