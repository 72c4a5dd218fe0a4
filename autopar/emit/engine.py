"""Gradient sync over the data axes: composable ``replicate`` on every unit, told to sum.

``replicate`` reduces one bucket for each unit during the backward, on a stream of its own. What it cannot hold (0-d
parameters, a second dtype in a unit, parameters used outside their unit, more than two model axes) is reduced where
the parameter is read (``Slot.over``): as the backward of I to R, exact for any number of forwards and backwards.

Seen in torch 2.13: ``fully_shard`` on a shard axis of size 1 labels the parameters ``_StridedShard``, and both leave
the gathered copies in the module after a forward without backward, where ``zero_grad``, ``named_parameters`` and new
optimizers would find them. So every forward ends with resharding; the backward gathers again, a local copy. A pass
that raises leaves state and gradients that the next one would add to: they are cleared.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from autopar.emit.params import Place, on_mesh, placements_of, restore_class, shard_of
from autopar.emit.units import Skeleton, Unit
from autopar.ir.program import Param

Users = Mapping[str, set[str]]  # parameter: paths of the units that read it, "" for the outer function


@dataclass
class Engine:
    """The units that ``replicate`` wraps, and the parameters that each of them reduces."""

    units: list[Unit] = field(default_factory=list)
    managed: dict[str, str] = field(default_factory=dict)  # parameter: path of its unit

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward: clears what a failed backward left, then puts the registered parameters back."""
        if not self.units:
            yield
            return
        self.heal()
        try:
            yield
        except BaseException:
            self._recover()
            raise
        for unit in self.units:
            unit.reshard()  # type: ignore[operator]

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around a backward: gradients are reduced in that of the last microbatch alone, and accumulate before."""
        for unit in self.units:
            unit.set_requires_gradient_sync(last, recurse=False)  # type: ignore[operator]
        yield

    def heal(self) -> None:
        """Clear what a backward that raised left behind."""
        idle = torch._C._current_graph_task_id() == -1
        if self.units and idle and self._root._state_ctx.post_backward_final_callback_queued:
            self._recover()

    @property
    def _root(self) -> Any:
        return self.units[-1]._get_fsdp_state()  # type: ignore[operator]

    def _recover(self) -> None:
        """Drop the state and the partial gradients of a forward or backward that raised."""
        if self._root._is_root is None:
            return
        self.units[-1].reset_iter_state()  # type: ignore[operator]
        groups = (g for s in self._root._state_ctx.all_states for g in s._fsdp_param_groups)
        for param in (p for g in groups for p in g.fsdp_params):
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def start(skeleton: Skeleton, params: Mapping[str, Param], users: Users, place: Place) -> Engine:
    """Attach ``replicate`` to the units; without data axes of several ranks there is nothing to do.

    Collective: groups are made. Registered parameters are exchanged for the engine's.
    """
    engine = Engine()
    if not place.data_axes:
        return engine
    engine.managed = _managed(skeleton, params, users, place)
    kept = {id(skeleton.tables[n][1][skeleton.tables[n][2]]) for n in engine.managed}
    ignored = {p for p in skeleton.root.parameters() if id(p) not in kept}
    assert place.over is not None
    mesh = place.over[place.data_axes]
    mesh = mesh if mesh.ndim == 1 else mesh._flatten("_".join(place.data_axes))
    for path in [p for p in skeleton.units if p in engine.managed.values()] + [""]:
        unit = skeleton.units.get(path, skeleton.root)
        replicate(unit, mesh=mesh, ignored_params=ignored)
        unit.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        unit.hooked = True
        engine.units.append(unit)
    whole = mesh if not place.model_axes else DeviceMesh._concatenate([mesh, place.submesh])
    for name, param in params.items():
        if param.kind == "parameter":
            _spread(skeleton, param, place, whole, name in engine.managed)
    return engine


def _spread(skeleton: Skeleton, param: Param, place: Place, mesh: DeviceMesh, managed: bool) -> None:
    """Put a parameter on the mesh that the engine puts its own on: list ops and norms refuse to mix meshes."""
    tables = [skeleton.tables[n][1:] for n in (param.name, *param.tied)]
    old = tables[0][0][tables[0][1]]
    new = old if managed else on_mesh(shard_of(old), param, mesh, (Replicate(), *placements_of(param, place)))
    restore_class(new, param, place)
    for table, key in tables:
        table[key] = new


def _managed(skeleton: Skeleton, params: Mapping[str, Param], users: Users, place: Place) -> dict[str, str]:
    """The unit that can reduce each parameter: all its readers are that unit, and all its names lie where it looks."""
    found: dict[str, str] = {}
    for name, param in params.items():
        readers = users.get(name, set())
        homes = {_home(n, skeleton.units) for n in (name, *param.tied)}
        simple = param.kind == "parameter" and param.spec.is_float and param.spec.shape and len(place.model_axes) <= 2
        if simple and readers and readers == homes and len(homes) == 1:
            found[name] = homes.pop()
    dtypes = {path: Counter(params[n].spec.dtype for n, p in found.items() if p == path) for path in found.values()}
    return {n: p for n, p in found.items() if params[n].spec.dtype == dtypes[p].most_common(1)[0][0]}


def _home(name: str, units: Mapping[str, Unit]) -> str:
    """The innermost unit under whose path the name lies."""
    parts = name.split(".")[:-1]
    prefixes = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
    return next((p for p in prefixes if p in units), "")
