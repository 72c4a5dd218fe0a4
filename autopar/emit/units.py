"""Thin modules that hold a layer's parameters and run the one function its kind shares, with local tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.emit.named import Container, part_called
from autopar.emit.owned import owned
from autopar.emit.segmented import SegmentedDTensor, segmented
from autopar.ir.program import Param
from autopar.runtime.axis import Axis
from autopar.runtime.collectives import all_reduce_invariant
from autopar.runtime.random import Streams


class Unit(Container):
    """A module that engines wrap: calling it runs ``call`` with its parameters gathered and their gradients reduced."""

    hooked = False  # whether an engine hooks the outputs; an in-place op on a view would drop its hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As any module's, by the programs alone. Raises AutoparError ``part-called`` before an engine gathers."""
        if not args or not isinstance(args[0], Call):
            raise part_called()
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, call: "Call", *values: Any) -> Any:
        """Run ``call`` on local tensors."""
        out = call(values)
        if self.hooked and torch.is_grad_enabled():
            return tuple(x.clone() if isinstance(x, Tensor) and x._is_view() and x.requires_grad else x for x in out)
        return out


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter or buffer is looked up at each call.

    Args:
        table: a module's own dict of parameters or buffers, in which engines exchange tensors.
        key: its name there.
        over: the axes over which its gradient is summed here, because no engine does it for this use.
        dtype: what it is cast to; None for its own.
    """

    table: Mapping[str, Tensor | None]
    key: str
    over: tuple[Axis, ...] = ()
    dtype: torch.dtype | None = None


class Call:
    """One call of a function: which tensors it takes besides the values that are passed.

    No dataclass: engines look for tensors in those.

    Args:
        function: takes values, then parameters and buffers, then handles; or in the order of ``places``.
        slots: its parameters and buffers.
        handles: axis handles; None where ``streams`` gives the state of this call.
        streams: random state, where the function takes it.
        path: the module path that its random state belongs to.
        places: for each argument, its index in (values, slots, handles) put together; None where that is the order.
        alone: whether each parameter joins the graph of a backward by itself.
    """

    __slots__ = ("alone", "function", "handles", "path", "places", "slots", "streams")

    def __init__(
        self,
        function: Callable[..., Any],
        slots: tuple[Slot, ...],
        handles: tuple[Any, ...] = (),
        streams: Streams | None = None,
        path: str = "",
        places: tuple[int, ...] | None = None,
        alone: bool = False,
    ) -> None:
        self.function, self.slots, self.handles = function, slots, handles
        self.streams, self.path, self.places, self.alone = streams, path, places, alone

    def __call__(self, values: Sequence[Any]) -> Any:
        """The function's result."""
        handles = self.handles
        if self.streams is not None:
            state = self.streams.at(self.path)
            handles = tuple(state if h is None else h for h in handles)
        if self.places is None:
            return self.function(*values, *locals_of(self.slots, self.alone), *handles)
        given = (*values, *locals_of(self.slots, self.alone), *handles)
        return self.function(*[given[i] for i in self.places])


class _Local(torch.autograd.Function):
    """This rank's parts of parameters; backward makes gradients of the parameters' own kind."""

    @staticmethod
    def forward(ctx: Any, overs: tuple[tuple[Axis, ...], ...], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.overs = overs
        ctx.likes = [_like(p) for p in params]
        return tuple(p._local_tensor.detach() if isinstance(p, DTensor) else p.detach() for p in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        summed = [_summed(g, over) for g, over in zip(grads, ctx.overs)]
        return (None, *(_wrapped(g, like) for g, like in zip(owned(summed), ctx.likes)))


Like = tuple[Any, Any, Any]  # a DTensor's spec, and the rows and axes of a segmented one


def _like(p: Tensor) -> Like | None:
    if isinstance(p, SegmentedDTensor):
        return p._spec, p.held, p.axes
    return (p._spec, None, None) if isinstance(p, DTensor) else None


def _summed(grad: Tensor | None, over: tuple[Axis, ...]) -> Tensor | None:
    for axis in over:
        grad = None if grad is None else all_reduce_invariant(grad, axis)
    return grad


def _wrapped(grad: Tensor | None, like: Like | None) -> Tensor | None:
    if grad is None or like is None:
        return grad
    spec, held, axes = like
    out = DTensor(grad, spec, requires_grad=False)
    return segmented(out, held, axes) if held is not None else out


def locals_of(slots: tuple[Slot, ...], alone: bool = False) -> list[Any]:
    """This rank's tensor of each slot, connected to the parameter where a gradient may be wanted; ``alone``: singly."""
    out: list[Any] = [s.table[s.key] for s in slots]
    grad = torch.is_grad_enabled()
    wanted = []
    for i, x in enumerate(out):
        if grad and x.requires_grad:
            if isinstance(x, DTensor) or slots[i].over:
                wanted.append(i)
        elif isinstance(x, DTensor):
            out[i] = x._local_tensor
    for some in [[i] for i in wanted] if alone else filter(None, [wanted]):
        parts = _Local.apply(tuple(slots[i].over for i in some), *[out[i] for i in some])
        for i, part in zip(some, parts):
            out[i] = part
    return [x if s.dtype in (None, x.dtype) else x.to(s.dtype) for x, s in zip(out, slots)]


@dataclass
class Skeleton:
    """The tree of the model's names. Constants, which the model has no name for, lie in ``constants``."""

    root: Unit
    units: dict[str, Unit]
    tables: dict[str, tuple[nn.Module, dict[str, Any], str]]  # name: its module, the dict that holds it, its key
    constants: dict[str, Tensor]

    def names(self) -> Iterator[str]:
        """Every original name, tied ones included."""
        return iter(self.tables)


def skeleton(params: Mapping[str, Param], tensors: Mapping[str, Tensor], units: Sequence[str]) -> Skeleton:
    """Modules with the model's names holding ``tensors``, with a Unit at each path of ``units`` and at the root."""
    out = Skeleton(Unit(), {}, {}, {})
    places: dict[str, nn.Module] = {"": out.root}
    paths = frozenset(units) - {""}

    def place(path: str) -> nn.Module:
        if path not in places:
            above, _, last = path.rpartition(".")
            made = place(above)._modules[last] = places[path] = Unit() if path in paths else Container()
            if isinstance(made, Unit):
                out.units[path] = made
        return places[path]

    for name, param in params.items():
        if param.kind == "constant":
            out.constants[name] = tensors[name]
            out.tables[name] = (out.root, out.constants, name)
        else:
            _register(out, name, param, tensors[name], place)
    for name, param in params.items():
        for other in param.tied:
            _register(out, other, param, tensors[name], place)
    return out


def _register(out: Skeleton, name: str, param: Param, tensor: Tensor, place: Callable[[str], nn.Module]) -> None:
    path, _, key = name.rpartition(".")
    module = place(path)
    table: dict[str, Any] = module._parameters if param.kind == "parameter" else module._buffers
    table[key] = tensor
    if param.kind != "parameter" and not param.persistent:
        module._non_persistent_buffers_set.add(key)
    out.tables[name] = (module, table, key)
