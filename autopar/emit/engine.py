"""Gradient sync and ZeRO over the data axes: ``replicate`` or ``fully_shard`` on every unit, told to sum.

Each group of the program's engine is one parameter group of its unit: it is gathered before the unit runs and reduced
in its backward, on a stream of its own. A unit may have several, one for each dtype, and the outer function's may hold
parameters from anywhere in the tree. What no engine can hold (scalars, more than two model axes) is reduced where the
parameter is read (``Slot.over``): as the backward of I to R, exact for any number of forwards and backwards.

Seen in torch 2.13: ``fully_shard`` labels parameters that tensor parallelism cuts along the same dim ``_StridedShard``,
and both leave the gathered copies in the module after a forward without backward, where ``zero_grad``,
``named_parameters`` and new optimizers would find them. So both wrap plain tensors on the meta device and are then
handed ours, with our own placements: the parameters that a user sees are never exchanged. And every forward that no
training step owns ends with resharding (at stage 0 the backward gathers again a local copy). A pass that raises leaves
state and gradients that the next one would add to: they are cleared.

Where data ranks repeat parameters nothing is made for the engine until the first forward of which a gradient may be
taken: until then it would only be waited for, by those who compile, load, export or evaluate.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from autopar.emit.params import Place, on_mesh, restore_class, shard_of, spread_over
from autopar.emit.units import Skeleton, Unit
from autopar.errors import AutoparError
from autopar.ir.layout import Layout, local_shape
from autopar.ir.program import Engine as Plan
from autopar.ir.program import Group, Param, Program, Spec
from autopar.passes.base import Context
from autopar.passes.zero import Zero, ways_of
from autopar.runtime.garbage import uncollected


@dataclass
class Engine:
    """The units that torch's engine wraps, and the parameters that each of them gathers and reduces."""

    plan: Plan = field(default_factory=Plan)
    units: list[Unit] = field(default_factory=list)  # empty until it is attached
    managed: dict[str, str] = field(default_factory=dict)  # parameter: path of its unit
    pending: Callable[[], list[Unit]] | None = None  # wraps the units
    sync: bool = True  # whether backwards reduce
    held: bool = False  # whether backwards leave everything gathered and unreduced

    def attach(self) -> None:
        """Let torch's engine wrap the units, if it does not yet."""
        if self.pending is not None:
            with uncollected():
                self.units = self.pending()
            self.pending = None
            if not self.sync:
                self._set_sync(False)
        self._check_hooks()

    def _check_hooks(self) -> None:
        """Raises AutoparError ``gradient-hook`` for hooks that the engine, which sums gradients, does not call."""
        for unit in self.units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
                for param in group.fsdp_params:
                    if param.sharded_param._backward_hooks:
                        raise AutoparError(
                            "gradient-hook",
                            f"{param._module_info.param_name}: a hook of register_hook on a parameter whose gradient is"
                            " summed over data ranks is never called",
                            "use register_post_accumulate_grad_hook, or change .grad before the optimizer's step",
                        )

    @contextmanager
    def forward(self, keep: bool = False) -> Iterator[None]:
        """Around a forward: clears what a failed backward left, then puts the registered parameters back.

        Args:
            keep: leave them gathered as the stage says, for the backward that follows at once.
        """
        if torch.is_grad_enabled():
            self.attach()
        if not self.units:
            yield
            return
        self.heal()
        try:
            yield
        except BaseException:
            self._recover()
            raise
        if not keep:
            self._reshard()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the backward of a microbatch.

        Gradients are reduced in the last one alone, in each from stage 2 on; parameters that stay gathered between
        forward and backward stay so until the last one.
        """
        for unit in self.units:
            sync = self.sync and not self.held and (last or self.plan.stage > 1)
            unit.set_requires_gradient_sync(sync, recurse=False)  # type: ignore[operator]
            free = not self.held and (last or self.plan.stage in (0, 3))
            unit.set_reshard_after_backward(free, recurse=False)  # type: ignore[operator]
        try:
            yield
        except BaseException:
            if self.units:
                self._recover()
            raise

    @contextmanager
    def pipelined(self, split: bool) -> Iterator[None]:
        """Around the schedule of a step: its forwards and backwards mix, and gradients are reduced behind it.

        Stage 2 and 3 reduce with each microbatch already.

        Args:
            split: whether backwards come in two parts. What is gathered stays, since the second part needs the same
                tensors, and gradients are reduced once.
        """
        self.attach()
        groups = [g for unit in self.units for g in unit._get_fsdp_state()._fsdp_param_groups]  # type: ignore[operator]
        freed = [g.post_forward_mesh_info for g in groups]
        self.held = split
        try:
            if split:
                for group in groups:
                    group.post_forward_mesh_info = None
            yield
            self._finish(groups)
        except BaseException:
            if self.units:
                self._recover()
            raise
        finally:
            self.held = False
            for group, info in zip(groups, freed):
                group.post_forward_mesh_info = info

    def _finish(self, groups: list[Any]) -> None:
        """Reduce what is not reduced yet, as ``torch.distributed.pipelining`` does."""
        self._set_sync(self.sync)
        for unit in self.units:
            unit.set_reshard_after_backward(True, recurse=False)  # type: ignore[operator]
        for group in groups:
            group.post_backward()
        if self.units and self._root._is_root is not None:
            self._root._root_post_backward_final_callback()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate what the next one outside reduces."""
        before = self.sync
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(before)

    def _set_sync(self, sync: bool) -> None:
        self.sync = sync
        for unit in self.units:
            unit.set_requires_gradient_sync(sync, recurse=False)  # type: ignore[operator]

    def heal(self) -> None:
        """Clear what a backward that raised left behind."""
        idle = torch._C._current_graph_task_id() == -1
        if self.units and idle and self._root._state_ctx.post_backward_final_callback_queued:
            self._recover()

    def forget(self) -> None:
        """Drop gradients that backwards without sync have accumulated."""
        for param in self._held():
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None

    @property
    def _root(self) -> Any:
        return self.units[-1]._get_fsdp_state()  # type: ignore[operator]

    def _held(self) -> Iterator[Any]:
        for unit in self.units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
                yield from group.fsdp_params

    def _reshard(self) -> None:
        for unit in self.units:
            unit.reshard()  # type: ignore[operator]

    def _recover(self) -> None:
        """Drop the state and the partial gradients of a forward or backward that raised."""
        if self._root._is_root is None:
            return
        self.units[-1].reset_iter_state()  # type: ignore[operator]
        self._set_sync(self.sync)
        for unit in self.units:
            unit.set_reshard_after_backward(True, recurse=False)  # type: ignore[operator]
        self.forget()


def engine_of(program: Program) -> Plan:
    """The program's engine; that of stage 0 where no pass chose one."""
    plan = program.engine or Zero().rewrite(replace(program, params=dict(program.params)), Context()).engine
    assert plan is not None
    return plan


def start(skeleton: Skeleton, params: Mapping[str, Param], plan: Plan, place: Place) -> Engine:
    """The engine of the units; without data axes of several ranks there is nothing to do.

    Collective: groups are made. At stage 0 the units are wrapped later, see the module's text.
    """
    engine = Engine(plan)
    if not place.summed_axes:
        return engine
    plan = replace(plan, groups=tuple(_own(plan.groups, params, place)))
    engine.plan = plan
    engine.managed = {n: g.unit for g in plan.groups for n in g.names}
    engine.pending = _Attach(skeleton, params, plan, place).units
    for unit in (*skeleton.units.values(), skeleton.root):
        unit.__dict__["__deepcopy__"] = _uncopied
    if plan.ways == 1:
        place.data_mesh(plan.axes)
        return engine
    engine.attach()
    for param in params.values():
        ways = ways_of(param, place.mesh, plan.ways)
        if param.kind == "parameter" and param.chunk is None and ways > 1:
            _spread(skeleton, param, place, ways)
    return engine


def _uncopied(memo: dict[int, Any]) -> NoReturn:
    why = "the module does not support deepcopy: data ranks' engine has hooks on its parameters"
    raise AutoparError("copied-module", why, "copy what pm.full_parameters() gives, or save and load")


def _own(groups: Iterable[Group], params: Mapping[str, Param], place: Place) -> Iterator[Group]:
    """The groups of what this rank holds: the engine takes no parameter that is empty here, another rank's expert."""
    empty: dict[tuple[Spec, Layout | None], bool] = {}

    def is_empty(param: Param) -> bool:
        kind = (param.spec, param.layout)
        if kind not in empty:
            empty[kind] = 0 in _local(param, place)
        return empty[kind]

    for group in groups:
        names = tuple(n for n in group.names if n in params and not is_empty(params[n]))
        if names:
            yield group if names == group.names else replace(group, names=names)


def _local(param: Param, place: Place) -> tuple[int, ...]:
    """Shape of the rank's part, before data ranks share it out."""
    assert param.layout is not None
    return local_shape(param.spec.shape, param.layout, place.mesh, place.at)


@dataclass
class _Attach:
    """Wraps units: ``fully_shard`` where data ranks share parameters out, else ``replicate``."""

    skeleton: Skeleton
    params: Mapping[str, Param]
    plan: Plan
    place: Place

    def units(self) -> list[Unit]:
        """Wrap every unit that has groups, and the root, which comes last."""
        paths = dict.fromkeys((*(g.unit for g in self.plan.groups if g.unit), ""))
        groups: dict[str, list[Group]] = {path: [] for path in paths}
        for group in self.plan.groups:
            groups[group.unit].append(group)
        units = [self.skeleton.units.get(path, self.skeleton.root) for path in paths]
        for unit, path in zip(units, paths):
            self.unit(unit, groups[path])
        if self.plan.prefetch:
            _prefetch(units, self.plan.prefetch)
        return units

    def unit(self, unit: Unit, groups: list[Group]) -> None:
        """Wrap one unit and give it its groups."""
        ways = self.plan.ways if self.plan.ways > 1 else None
        mesh, below = self.place.data_mesh(self.plan.axes, ways), set(unit.parameters())
        if ways is None:
            replicate(unit, mesh=mesh, ignored_params=below)
        else:
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.plan.stage == 3, ignored_params=below)
        for group in groups:
            self._group(unit, group)
        unit.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        unit.hooked = True

    def _group(self, unit: Unit, group: Group) -> None:
        """One parameter group: it is made of empty parameters, and ours are put in their place."""
        shared = group.ways > 1
        mesh = self.place.data_mesh(group.axes, group.ways if shared else None)
        info: Any = DDPMeshInfo(mesh, replicate_mesh_dim=0)
        if shared:
            kinds = {1: lambda: FSDPMeshInfo(mesh, 0), 2: lambda: HSDPMeshInfo(mesh, 1, 0)}
            info = kinds[mesh.ndim]()
        ours = {n: self._table(n) for n in group.names}
        dims: dict[int, int] = {}
        empty: list[nn.Parameter] = []
        for name in ours:
            chunk = self.params[name].chunk
            empty.append(self._hollow(self.params[name]))
            dims[id(empty[-1])] = chunk.dim if chunk else 0
            self._set(name, empty[-1])
        made = FSDPParamGroup(
            empty, (unit,), info, info if shared and not group.keeps else None, self.place.device,
            (lambda p: ShardPlacement(dims[id(p)])) if shared else None, self._precision(group), self._offload(shared),
        )  # fmt: skip
        unit._get_fsdp_state()._fsdp_param_groups.append(made)  # type: ignore[operator]
        for (name, old), held in zip(ours.items(), made.fsdp_params):
            self._set(name, self._settled(old) if shared else old)
            held.reset_sharded_param()

    def _table(self, name: str) -> Tensor:
        _, table, key = self.skeleton.tables[name]
        found: Tensor = table[key]
        return found

    def _set(self, name: str, value: Tensor) -> None:
        for alias in (name, *self.params[name].tied):
            _, table, key = self.skeleton.tables[alias]
            table[key] = value

    def _hollow(self, param: Param) -> nn.Parameter:
        """The rank's whole part without memory."""
        empty = torch.empty(_local(param, self.place), dtype=param.spec.dtype, device="meta")
        return nn.Parameter(empty, requires_grad=param.trainable)

    def _settled(self, old: Tensor) -> Tensor:
        """Our parameter, in host memory where that is asked for."""
        if self.plan.offload == "cpu" and isinstance(old, DTensor) and not old._local_tensor.is_meta:
            old._local_tensor = old._local_tensor.cpu()
        return old

    def _precision(self, group: Group) -> MixedPrecisionPolicy:
        if self.plan.precision == "fp32" or group.dtype != torch.float32:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def _offload(self, shared: bool) -> OffloadPolicy:
        cpu = self.plan.offload == "cpu" and shared
        return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if cpu else OffloadPolicy()


def _prefetch(units: list[Unit], depth: int) -> None:
    """Let each unit gather the ``depth`` ones that come after it, and in the backward the ones before it."""
    order = units[:-1]
    for i, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + depth])  # type: ignore[operator]
        unit.set_modules_to_backward_prefetch(order[max(0, i - depth) : i][::-1])  # type: ignore[operator]


def _spread(skeleton: Skeleton, param: Param, place: Place, ways: int) -> None:
    """Put what data ranks repeat on the mesh of what they share out: list ops and norms refuse to mix meshes."""
    tables = [skeleton.tables[n][1:] for n in (param.name, *param.tied)]
    old = tables[0][0][tables[0][1]]
    new = on_mesh(shard_of(old), param, *spread_over(param, place, ways))
    restore_class(new, param, place)
    for table, key in tables:
        table[key] = new
