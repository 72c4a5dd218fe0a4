"""A model to a functional graph of aten ops, by ``torch.export`` without strict mode."""

import warnings
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from autopar.errors import AutoparError
from autopar.ir.program import Param, Spec
from autopar.trace import places
from autopar.trace.attached import inline_no_grad
from autopar.trace.backward import watched
from autopar.trace.experts import Candidates
from autopar.trace.layers import repeated
from autopar.trace.once import Unsafe, bodies_of, intercepted
from autopar.trace.prepare import prepared, quiet
from autopar.trace.state import Carried, Place, Snapshot, watched_attributes
from autopar.trace.structure import Node, Structure, scan
from autopar.trace.watch import Watch, no_draws

Named = tuple[dict[str, Param], dict[str, str]]  # parameters and buffers by first name, and each name's first name
WRAPPED = "m"  # the name of the user's model in the wrapper; stripped from every path


@dataclass
class Exported:
    """A functional aten graph whose placeholders are known by name.

    Placeholders carry ``meta["param"]`` or ``meta["input"]``. ``outputs`` describes the graph's flat result:
    ("user", ""), ("loss", "") or ("buffer", name).
    """

    graph: fx.Graph
    params: dict[str, Param]
    constants: dict[str, Tensor]
    outputs: list[tuple[str, str]]
    structure: Structure
    notes: list[str] = field(default_factory=list)
    bodies: dict[str, "Exported"] = field(default_factory=dict)  # of layers that are single nodes, by path
    unseen: list[str] = field(default_factory=list)  # why modules that could hold experts were traced as they stand

    @property
    def looks(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of each result."""
        values = [n.meta["val"] for n in self.graph.output_node().args[0]]  # type: ignore[union-attr]
        return [(tuple(map(int, v.shape)), str(v.dtype).removeprefix("torch.")) for v in values]


@dataclass
class _Seen:
    """What the forward found out; kept apart because export undoes assignments to a module."""

    loss: bool = False
    dropped: set[str] = field(default_factory=set)
    changed: list[Place] = field(default_factory=list)
    after: Snapshot | None = None  # what the forward left, where that is not what it met
    carried: Carried = field(default_factory=Carried)
    moved: list[Place] = field(default_factory=list)  # what a second call changed once more


class _Flat(nn.Module):
    """The model as a function of a flat list of tensors that returns a flat list of tensors."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        loss: Callable[[Any], Tensor] | None,
        whole: bool = True,
        twice: list[Place] | None = None,
    ) -> None:
        super().__init__()
        setattr(self, WRAPPED, model)
        self.structure = structure
        self.loss = [loss]  # in a list, so that a loss that is a module is not registered
        self.seen = _Seen()
        self.running: list[bool] = []  # not empty while the forward runs
        self.whole = whole  # a layer alone has no loss
        self.twice = twice  # attributes to watch in a second call, which sees what the first one left
        self.parts = [dict(model.named_modules())]  # in a list, as above

    def forward(self, *flat: Tensor) -> list[Tensor]:
        self.running.append(True)
        try:
            return self._run(list(flat))
        finally:
            self.running.clear()

    def _run(self, flat: list[Tensor]) -> list[Tensor]:
        args, kwargs = self.structure.unflatten(flat)
        before = Snapshot.of(self.parts[0])
        try:
            out = self._call(args, kwargs)
            before.keep_tensors()
            found: list[Tensor] = []
            self.structure.output = scan(out, found, self._drop)
            loss = loss_of(self.loss[0], out, self.structure.output, found) if self.whole else None
            self.seen.changed = before.changed()
            self.seen.after = Snapshot.of(self.parts[0]) if self.seen.changed else None
        finally:
            before.restore()
        self.seen.loss = loss is not None
        return [*found, loss] if loss is not None else found

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = getattr(self, WRAPPED)
        with no_draws(model), Watch(model):
            out = model(*args, **kwargs)
            if self.twice is not None:
                first = Snapshot.of(self.parts[0])
                with watched_attributes(model, self.parts[0], self.twice) as self.seen.carried:
                    out = model(*args, **kwargs)
                self.seen.moved = first.changed()
        return out

    def _drop(self, value: Any) -> None:
        self.seen.dropped.add(type(value).__name__)


def loss_of(given: Callable[[Any], Tensor] | None, out: Any, node: Node, found: list[Tensor]) -> Tensor | None:
    """The loss: ``given(out)``, else the output's ``loss``, else the output where it is one float; None without any.

    ``node`` and ``found``: how the output nests, and its tensors. Raises AutoparError ``loss-not-scalar``.
    """
    loss = given(out) if given else out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if loss is None and node.kind == "tensor" and found[0].ndim == 0 and found[0].is_floating_point():
        return found[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    if given is None or loss is None:
        return None
    what = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise AutoparError(
        "loss-not-scalar", f"loss: got {what}, not one float", "let loss(output) return a scalar float tensor"
    )


def export(
    model: nn.Module,
    structure: Structure,
    flat: list[Tensor],
    loss: Callable[[Any], Tensor] | None,
    train: bool,
    once: bool = True,
    dense: bool = False,
) -> Exported:
    """The functional graph of the model on ``flat``, and of its loss.

    ``once``: layers of one kind are traced once where that is safe, and further ones are nodes with a body.
    ``dense``: loops in which every token goes to every expert are one op, too.
    Raises AutoparError ``data-dependent-control-flow``, ``input-mutation``, ``custom-backward``, ``python-state``,
    ``random-op``, ``trace-failed``.
    """
    notes: list[str] = []
    checkpoints: list[str] = []
    with (
        watched(model),
        prepared(model, train, notes, checkpoints, dense) as candidates,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        exported = _export_once(model, structure, flat, loss, candidates) if once else None
        if exported is None:
            wrapper = _Flat(model, structure, loss)
            exported = _export(model, wrapper, flat, params_of(model))
            if wrapper.seen.changed:
                notes += _refuse_carried(wrapper, exported, flat)
    exported.notes += notes
    exported.unseen += candidates.unseen
    if checkpoints:
        _say_checkpoints(checkpoints, exported.notes)
    return exported


def _refuse_carried(wrapper: _Flat, exported: Exported, flat: list[Tensor]) -> list[str]:
    """Notes on attributes that calls only update. Raises AutoparError ``python-state`` for one that is read, too.

    One is let pass: what the first call sets for good, and every later call computes the same from.
    """
    model = getattr(wrapper, WRAPPED)
    probe = _Flat(model, copy(wrapper.structure), None, whole=False, twice=wrapper.seen.changed)
    try:
        _export(model, probe, flat, params_of(model))
    except (AutoparError, Unsafe):
        if not probe.seen.carried.read:
            raise
    read = probe.seen.carried.read

    def later(again: _Flat) -> Exported:
        return _export(model, again, flat, params_of(model))

    if read and (read.keys() & set(probe.seen.moved) or not _same_afterwards(wrapper, exported, later)):
        (path, name), line = next(iter(read.items()))
        raise AutoparError(
            "python-state",
            f"{f'{path}.{name}' if path else name}: the forward leaves it changed for the next call, which reads it:"
            f" {line}; a compiled program would see the first value for ever",
            "keep it as a tensor in a registered buffer, or compute it outside and pass it as an input",
        )
    names = sorted(f"{path}.{name}" if path else name for path, name in probe.seen.carried.updated)
    return [f"{name}: the forward updates it; in the parallel model it stays as it is" for name in names]


def _same_afterwards(
    wrapper: _Flat, exported: Exported, later: Callable[[_Flat], Exported], good: bool = False
) -> bool:
    """Whether a trace that starts from what the first call left gives the same graph.

    Args:
        later: makes that trace.
        good: it must change nothing any more, too.
    """
    model, after = getattr(wrapper, WRAPPED), wrapper.seen.after
    assert after is not None
    before, again = Snapshot.of(wrapper.parts[0]), _Flat(model, copy(wrapper.structure), wrapper.loss[0])
    try:
        after.restore(wrapper.seen.changed)
        second = later(again)
    except (AutoparError, Unsafe):
        return False
    finally:
        before.restore()
    same = str(second.graph) == str(exported.graph) and second.outputs == exported.outputs
    return same and not (good and again.seen.changed)


def _export_once(
    model: nn.Module,
    structure: Structure,
    flat: list[Tensor],
    loss: Callable[[Any], Tensor] | None,
    candidates: Candidates,
) -> Exported | None:
    """The graph in which each kind of layer was traced once; None where that is not safe."""
    ways = [False, True]
    candidates.restart = True
    try:
        while ways and repeated(model, everywhere=True):
            restarts = candidates.restarts
            try:
                return _once(model, structure, flat, loss, ways[-1])
            except (Unsafe, AutoparError):
                if candidates.restarts > restarts:
                    continue
                if not repeated(model):
                    raise
                ways.pop()
    finally:
        candidates.restart = False
    return None


def _once(
    model: nn.Module, structure: Structure, flat: list[Tensor], loss: Callable[[Any], Tensor] | None, hide: bool
) -> Exported | None:
    """The same in one of the two ways to intercept layers. Raises Unsafe, AutoparError."""
    params, wrapper = params_of(model), _Flat(model, structure, loss)

    def later(again: _Flat) -> Exported:
        with intercepted(model, hide, again.running):
            return _export(model, again, flat, params)

    with intercepted(model, hide, wrapper.running) as calls:
        exported = _export(model, wrapper, flat, params)
    if wrapper.seen.changed and not _same_afterwards(wrapper, exported, later, good=True):
        return None
    exported.bodies = bodies_of(model, calls, _body)
    return exported


def _body(layer: nn.Module, structure: Structure, flat: list[Tensor]) -> Exported:
    wrapper = _Flat(layer, structure, None, whole=False)
    try:
        exported = _export(layer, wrapper, flat, params_of(layer))
    except AutoparError as error:
        raise Unsafe(str(error)) from error
    if wrapper.seen.changed or any(kind == "buffer" for kind, _ in exported.outputs):
        raise Unsafe("the layer writes into a buffer or an attribute")
    return exported


def _export(traced: nn.Module, wrapper: "_Flat", flat: list[Tensor], params: Named) -> Exported:
    wrapper.training = traced.training
    try:
        with quiet():
            program = torch.export.export(wrapper, tuple(flat), strict=False)
            inline_no_grad(program)
            program = program.run_decompositions({})
    except (AutoparError, Unsafe):
        raise
    except Exception as error:
        if any(isinstance(e, Unsafe) for e in places.chain(error)):
            raise Unsafe(str(error)) from error
        raise places.explain(error, traced) from error
    dropped = sorted(wrapper.seen.dropped)
    notes = [f"the output's {name} holds no plain value and is None in the parallel model" for name in dropped]
    return _named(program, params, wrapper.structure, wrapper.seen.loss, notes)


def _say_checkpoints(found: list[str], notes: list[str]) -> None:
    where = ", ".join(sorted(set(found)))
    notes.append(
        f"activation checkpointing inside the model ({where}) vanishes in the trace; use the recompute pass instead"
    )


def _named(program: ExportedProgram, named: Named, structure: Structure, has_loss: bool, notes: list[str]) -> Exported:
    """Placeholders by their original names; outputs by what they are."""
    params, first = dict(named[0]), named[1]
    constants: dict[str, Tensor] = {}
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    position = 0
    for spec in program.graph_signature.input_specs:
        node = nodes[getattr(spec.arg, "name", "")]
        if spec.kind is InputKind.USER_INPUT:
            node.meta["input"] = position
            position += 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            node.meta["param"] = first[strip(spec.target)]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            _constant(node, strip(spec.target), program.constants[spec.target or ""], params, constants)
        else:
            raise AutoparError("trace-failed", f"input {spec}: {spec.kind} cannot be traced", "pass tensors")
    return Exported(program.graph, params, constants, _outputs(program, first, has_loss), structure, notes)


def _constant(node: fx.Node, name: str, value: Any, params: dict[str, Param], constants: dict[str, Tensor]) -> None:
    if not isinstance(value, Tensor):
        raise AutoparError("trace-failed", f"{name}: a {type(value).__name__} cannot be traced", "use tensors")
    node.meta["param"] = name
    value = value.detach()
    params[name] = Param(name, Spec(tuple(value.shape), value.dtype), "constant", False, False)
    constants[name] = value


def _outputs(program: ExportedProgram, first: dict[str, str], has_loss: bool) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            out.append(("user", ""))
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            out.append(("buffer", first[strip(spec.target)]))
        else:
            raise AutoparError(
                "input-mutation",
                f"{spec.target}: the forward writes into one of its inputs, parameters or constants",
                "clone the tensor before the in-place operation, or register it as a buffer",
            )
    if has_loss:
        last = max(i for i, (kind, _) in enumerate(out) if kind == "user")
        out[last] = ("loss", "")
    return out


def strip(path: str | None) -> str:
    """A path in the wrapper as a path in the user's model."""
    path = path or ""
    return path.removeprefix(f"{WRAPPED}.") if path != WRAPPED else ""


def params_of(model: nn.Module) -> Named:
    """Parameters and buffers by first name, and each name's first name."""
    names: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
        tensors[name] = tensor
    hidden = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    params = {}
    for main, *tied in names.values():
        value = tensors[main]
        spec = Spec(tuple(value.shape), value.dtype)
        kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
        params[main] = Param(main, spec, kind, value.requires_grad, main not in hidden, tuple(tied))
    return params, {n: group[0] for group in names.values() for n in group}
