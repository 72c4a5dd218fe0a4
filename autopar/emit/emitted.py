"""The functions of one variant of a program, bound to the module's parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autopar.emit.chains import looped
from autopar.emit.engine import Engine
from autopar.emit.function import Argument, Outer, Site, function_of, identifier, outer_of, split_runs
from autopar.emit.params import Place
from autopar.emit.recompute import recomputed
from autopar.emit.units import Call, Skeleton, Slot
from autopar.errors import AutoparError
from autopar.ir.program import Output, Param, Program
from autopar.ir.units import users_of
from autopar.runtime.dispatch import ROOM, dispatched_experts
from autopar.runtime.garbage import uncollected
from autopar.runtime.load import Loads
from autopar.runtime.random import Streams


class Structure(Protocol):
    """How a call's inputs become a list of tensors, and a list of tensors the model's output."""

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of ``Program.inputs``."""

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """The model's output structure holding ``tensors``."""


class Variant(Protocol):
    """A LOCAL program for one way of calling the model: mode, shapes, whether only the loss is wanted."""

    @property
    def program(self) -> Program:
        """The program of this rank."""

    @property
    def structure(self) -> Structure:
        """The nests of the call."""


@dataclass
class Emitted:
    """A variant that can be called: ``call`` is the outer function, run by the root unit on the flat inputs."""

    call: Call
    outputs: tuple[Output, ...]
    functions: dict[str, list[Call]]  # block: its calls
    outer: Outer
    sites: dict[str, Callable[..., Any]] = field(default_factory=dict)
    compiled: bool = False
    dispatches: bool = False  # whether rows travel to experts in numbers that depend on values

    def compile(self, **options: Any) -> None:
        """``torch.compile`` each kind of block, and each run of nodes between calls, once."""
        if self.compiled:
            return
        if self.dispatches:
            why = "compile: the number of rows that a rank sends to an expert depends on values"
            raise AutoparError("compile-experts", why, "Strategy(expert_capacity=...), whose shapes are static")
        self.compiled = True
        options = {"fullgraph": True, "dynamic": False, **options}
        for calls in filter(None, self.functions.values()):
            fast = torch.compile(calls[0].function, **options)
            for call in calls:
                call.function = fast
        graph, runs = split_runs(self.outer.graph)
        made = {name: torch.compile(function_of(run, name), **options) for name, run in runs.items()}
        self.call.function = function_of(graph, "outer", SimpleNamespace(**self.sites, **made))


@uncollected()
def emit(
    program: Program,
    skeleton: Skeleton,
    engine: Engine,
    place: Place,
    handles: Mapping[str, Any],
    constants: Mapping[str, Tensor] | None = None,
    alone: bool = False,
) -> Emitted:
    """Functions of a LOCAL program: one for each kind of block and one for the outer graph.

    Args:
        handles: the value of every handle placeholder: axes by name, and under "rng" the random Streams.
        constants: tensors of this variant alone, whole: another trace may have others of the same name.
        alone: each parameter joins the graph of a backward by itself, so that it can be left out of one.
    """
    users = users_of(program)
    own: dict[str, Tensor | None] = {n: t.to(place.device) for n, t in (constants or {}).items() if n in program.params}
    for _, graph in program.graphs():
        on_device(graph, place.device)

    def owned(path: str, name: str) -> bool:
        return path in skeleton.units and users[name] == {path}

    def slot(path: str, name: str) -> Slot:
        if name in own:
            return Slot(own, name)
        _, table, key = skeleton.tables[name]
        unit = engine.managed.get(name)
        param = program.params[name]
        needs = param.kind == "parameter" and unit not in (path, "")
        if needs and unit is not None and param.chunk is not None:
            raise _moved(name, unit, path)
        over = tuple(place.axes[a] for a in param.summed_over(place.mesh)) if needs else ()
        return Slot(table, key, over, _lower(param, engine))

    outer = outer_of(program, owned, loops=True)
    blocks = {
        name: recomputed(function_of(block.graph, f"block_{identifier(name)}"), block.recompute)
        for name, block in program.blocks.items()
    }
    functions: dict[str, list[Call]] = {name: [] for name in blocks}
    sites: dict[str, Callable[..., Any]] = {}
    for i, site in enumerate(outer.sites):
        call = _bind(blocks[site.block], site.arguments, partial(slot, site.path), handles, site.path, alone)
        functions[site.block].append(call)
        sites[f"call{i}"] = _runner(skeleton, site, call)
    for i, (members, carried) in enumerate(outer.loops):
        sites[f"loop{i}"] = looped([sites[f"call{m}"] for m in members], carried)
    function = function_of(outer.graph, "outer", SimpleNamespace(**sites))
    call = _bind(function, outer.arguments, partial(slot, ""), handles, "", alone)
    uneven = any(n.target is dispatched_experts and n.args[ROOM] is None for _, g in program.graphs() for n in g.nodes)
    return Emitted(call, program.outputs, functions, outer, sites, dispatches=uneven)


def _lower(param: Param, engine: Engine) -> torch.dtype | None:
    """The dtype that a parameter is computed in, where it is not its own."""
    cast = engine.plan.precision == "bf16" and param.kind == "parameter" and param.spec.dtype == torch.float32
    return torch.bfloat16 if cast else None


def _moved(name: str, unit: str, path: str) -> AutoparError:
    why = f"{name}: {path or 'the outer function'} reads it in this call, but {unit} gathers it"
    return AutoparError("zero-unit", why, "make the first call one of the same kind, or use zero=0")


def on_device(graph: fx.Graph, device: torch.device) -> None:
    """Ops that make tensors from nothing make them on ``device``."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        makes = schema is not None and not node.all_input_nodes and any(a.name == "device" for a in schema.arguments)
        if makes and device.type != "cpu":
            node.kwargs = {**node.kwargs, "device": device}


def _runner(skeleton: Skeleton, site: Site, call: Call) -> Callable[..., Any]:
    unit = skeleton.units.get(site.path)
    return partial(unit, call) if unit is not None else lambda *values: call(values)


def _bind(
    function: Callable[..., Any],
    arguments: tuple[Argument, ...],
    slot: Callable[[str], Slot],
    handles: Mapping[str, Any],
    path: str,
    alone: bool,
) -> Call:
    kinds = ("value", "param", "handle")
    of = {kind: [i for i, a in enumerate(arguments) if a.kind == kind] for kind in kinds}
    order = [i for kind in kinds for i in of[kind]]
    places = None if order == sorted(order) else tuple(order.index(i) for i in range(len(order)))
    slots = tuple(slot(arguments[i].name) for i in of["param"])
    taken = [handles[arguments[i].name] for i in of["handle"]]
    streams = next((h for h in taken if isinstance(h, Streams)), None)
    fixed = tuple(None if isinstance(h, Streams) else h.at(path) if isinstance(h, Loads) else h for h in taken)
    return Call(function, slots, fixed, streams, path, places, alone)
