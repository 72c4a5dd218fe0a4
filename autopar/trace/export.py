"""A model to a functional graph of aten ops, by ``torch.export`` without strict mode."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
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
from autopar.trace.carried import State, inline
from autopar.trace.experts import Candidates
from autopar.trace.flat import WRAPPED, Flat, Seen
from autopar.trace.layers import repeated
from autopar.trace.memories import Change
from autopar.trace.once import Unsafe, bodies_of, intercepted
from autopar.trace.prepare import prepared, quiet
from autopar.trace.settle import left_by, steady
from autopar.trace.state import Snapshot
from autopar.trace.structure import Structure

Named = tuple[dict[str, Param], dict[str, str]]  # parameters and buffers by first name, and each name's first name


@dataclass
class Exported:
    """A functional aten graph whose placeholders are known by name.

    Placeholders carry ``meta["param"]`` or ``meta["input"]``. ``outputs`` describes the graph's flat result:
    ("user", ""), ("loss", ""), ("kept", "") for what a call leaves in attributes, or ("buffer", name).
    """

    graph: fx.Graph
    params: dict[str, Param]
    constants: dict[str, Tensor]
    outputs: list[tuple[str, str]]
    structure: Structure
    notes: list[str] = field(default_factory=list)
    bodies: dict[str, "Exported"] = field(default_factory=dict)  # of layers that are single nodes, by path
    unseen: list[str] = field(default_factory=list)  # why modules that could hold experts were traced as they stand
    left: State | None = None  # what a call leaves in attributes for later ones; None where it changes nothing
    outside: list[Change] = field(default_factory=list)  # globals and attributes of classes that it changed

    @property
    def looks(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of each result."""
        values = [n.meta["val"] for n in self.graph.output_node().args[0]]  # type: ignore[union-attr]
        return [(tuple(map(int, v.shape)), str(v.dtype).removeprefix("torch.")) for v in values]


def export(
    model: nn.Module,
    structure: Structure,
    flat: list[Tensor],
    loss: Callable[[Any], Tensor] | None,
    train: bool,
    once: bool = True,
    dense: bool = False,
    start: State | None = None,
) -> Exported:
    """The functional graph of the model on ``flat``, and of its loss.

    ``once``: layers of one kind are traced once where that is safe, and further ones are nodes with a body.
    ``dense``: loops in which every token goes to every expert are one op, too.
    ``start``: what earlier calls left in attributes.
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

        def run() -> Exported:
            exported = None
            if once and not (start and start.stands):
                with start.installed(model) if start else nullcontext():
                    exported = _export_once(model, structure, flat, loss, candidates, start)
            return exported or _export_whole(model, structure, flat, loss, start)

        exported = run()
        exported.notes += [*notes, *steady(exported, run)]
    exported.unseen += candidates.unseen
    if checkpoints:
        _say_checkpoints(checkpoints, exported.notes)
    return exported


def _export_whole(
    model: nn.Module,
    structure: Structure,
    flat: list[Tensor],
    loss: Callable[[Any], Tensor] | None,
    start: State | None,
) -> Exported:
    """The graph of the model in which every layer was traced, from ``start``."""
    params = params_of(model)

    def run(wrapper: Flat) -> Exported:
        return _export(model, wrapper, [*flat, *(wrapper.start.zeros(model) if wrapper.start else [])], params)

    wrapper = Flat(model, structure, loss, start=start)
    exported = run(wrapper)
    if wrapper.seen.changed:
        exported.left, notes = left_by(wrapper, run)
        exported.notes += notes
    if start:
        inline(start, exported)
    return exported


def _same_afterwards(wrapper: Flat, exported: Exported, later: Callable[[Flat], Exported]) -> bool:
    """Whether a trace that starts from what the first call left gives the same graph, and changes nothing any more.

    ``later`` makes that trace.
    """
    model, after = getattr(wrapper, WRAPPED), wrapper.seen.after
    assert after is not None
    before, again = Snapshot.of(wrapper.parts[0]), Flat(model, copy(wrapper.structure), wrapper.loss[0])
    try:
        after.restore(wrapper.seen.changed)
        second = later(again)
    except (AutoparError, Unsafe):
        return False
    finally:
        before.restore()
    return str(second.graph) == str(exported.graph) and second.outputs == exported.outputs and not again.seen.changed


def _export_once(
    model: nn.Module,
    structure: Structure,
    flat: list[Tensor],
    loss: Callable[[Any], Tensor] | None,
    candidates: Candidates,
    start: State | None,
) -> Exported | None:
    """The graph in which each kind of layer was traced once; None where that is not safe.

    ``start``: what earlier calls left, without tensors; the model has it.
    """
    ways = [False, True]
    candidates.restart = True
    try:
        while ways and repeated(model, everywhere=True):
            restarts = candidates.restarts
            try:
                return _once(model, structure, flat, loss, ways[-1], start)
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
    model: nn.Module,
    structure: Structure,
    flat: list[Tensor],
    loss: Callable[[Any], Tensor] | None,
    hide: bool,
    start: State | None,
) -> Exported | None:
    """The same in one of the two ways to intercept layers. Raises Unsafe, AutoparError."""
    params, wrapper = params_of(model), Flat(model, structure, loss)

    def later(again: Flat) -> Exported:
        with intercepted(model, hide, again.running):
            return _export(model, again, flat, params)

    with intercepted(model, hide, wrapper.running) as calls:
        exported = _export(model, wrapper, flat, params)
    if wrapper.seen.changed and not _same_afterwards(wrapper, exported, later):
        return None
    left = wrapper.seen.left and wrapper.seen.left.lasting
    exported.left = left.over(start) if left and start else left
    exported.bodies = bodies_of(model, calls, _body)
    return exported


def _body(layer: nn.Module, structure: Structure, flat: list[Tensor]) -> Exported:
    wrapper = Flat(layer, structure, None, whole=False)
    try:
        exported = _export(layer, wrapper, flat, params_of(layer))
    except AutoparError as error:
        raise Unsafe(str(error)) from error
    if wrapper.seen.changed or any(kind == "buffer" for kind, _ in exported.outputs):
        raise Unsafe("the layer writes into a buffer or an attribute")
    return exported


def _export(traced: nn.Module, wrapper: "Flat", flat: list[Tensor], params: Named) -> Exported:
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
    lost = (f"{path}.{name}".lstrip(".") for path, name in wrapper.seen.lost)
    notes += [f"{name}: what the forward leaves there cannot be copied, and no other call meets it" for name in lost]
    return _named(program, params, wrapper, notes)


def _say_checkpoints(found: list[str], notes: list[str]) -> None:
    where = ", ".join(sorted(set(found)))
    notes.append(
        f"activation checkpointing inside the model ({where}) vanishes in the trace; use the recompute pass instead"
    )


def _named(program: ExportedProgram, named: Named, wrapper: Flat, notes: list[str]) -> Exported:
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
    outputs = _outputs(program, first, wrapper.seen)
    return Exported(program.graph, params, constants, outputs, wrapper.structure, notes, outside=wrapper.seen.outside)


def _constant(node: fx.Node, name: str, value: Any, params: dict[str, Param], constants: dict[str, Tensor]) -> None:
    if not isinstance(value, Tensor):
        raise AutoparError("trace-failed", f"{name}: a {type(value).__name__} cannot be traced", "use tensors")
    node.meta["param"] = name
    value = value.detach()
    params[name] = Param(name, Spec(tuple(value.shape), value.dtype), "constant", False, False)
    constants[name] = value


def _outputs(program: ExportedProgram, first: dict[str, str], seen: Seen) -> list[tuple[str, str]]:
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
    users = [i for i, (kind, _) in enumerate(out) if kind == "user"]
    own = len(users) - len(seen.kept)
    for i in users[own:]:
        out[i] = ("kept", "")
    if seen.loss:
        out[users[own - 1]] = ("loss", "")
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
