"""From a model and one data rank's example to a Program."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Output, Program, Spec
from autopar.trace.blueprint import blueprint, mode_of
from autopar.trace.carried import State
from autopar.trace.export import Exported, export
from autopar.trace.fold import fold
from autopar.trace.gradients import mark_differentiable
from autopar.trace.normalize import normalize
from autopar.trace.places import also
from autopar.trace.simplify import simplify
from autopar.trace.structure import Structure

BatchDims = Mapping[str, int | None] | Sequence[int | None]


@dataclass
class Traced:
    """A traced model: its program, how its inputs and outputs nest, and the values of its constants."""

    program: Program
    structure: Structure
    constants: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    left: State | None = None  # what a call leaves in attributes for later ones; None where it changes nothing


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    mesh: Mesh,
    rows: tuple[int, ...] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    batch_dims: BatchDims | None = None,
    train: bool = True,
    once: bool = True,
    start: State | None = None,
) -> Traced:
    """The Program (Form TRACED) of ``model`` on the global batch. The model is left as it was.

    Args:
        args, kwargs: one data rank's example inputs; only shapes, dtypes and plain values matter.
        rows: rows of each data rank; as many as the example's on every rank where None.
        loss: from the model's output to a scalar; else the output's ``loss``, else a scalar output.
        batch_dims: batch dim of each input by dotted name or in order; dim 0 of those as long as the first where None.
        train: whether the graph is that of train mode.
        once: trace layers of one kind once where that is safe; the program is the same.
        start: what earlier calls left in attributes.

    Raises AutoparError ``input-structure``, ``batch-dims``, ``data-dependent-control-flow``, ``input-mutation``,
    ``custom-backward``, ``random-op``, ``loss-not-scalar``, ``trace-failed``, ``unsupported-op``.
    """
    structure, tensors = Structure.of(model, args, kwargs)
    inputs, rows = global_inputs(structure, tensors, mesh, rows, batch_dims)
    if any(p.is_meta for p in model.parameters()):
        model = blueprint(model)
    device = next((t.device for t in [*model.parameters(), *model.buffers(), *tensors]), torch.device("cpu"))
    with mode_of(model) or nullcontext():
        flat = [torch.zeros(i.spec.shape, dtype=i.spec.dtype, device=device) for i in inputs]
    exported = export(model, structure, flat, loss, train, once, mesh.size("ep") > 1, start)
    return finish(exported, mesh, inputs, rows)


def finish(exported: Exported, mesh: Mesh, inputs: tuple[Input, ...], rows: tuple[int, ...]) -> Traced:
    """From the exported graph to the folded program."""
    try:
        graph = normalize(exported)
    except AutoparError as error:
        raise also(error, exported.unseen) from error.__cause__
    params = dict(exported.params)
    for node in graph.find_nodes(op="placeholder"):
        if "input" in node.meta:
            node.meta["name"] = inputs[node.meta["input"]].name
    mark_differentiable(graph, params)
    simplify(graph, apart=mesh.size("cp") > 1)
    mark_differentiable(graph, params)
    outputs = _outputs(graph, exported, inputs, rows)
    kept = {n.meta["param"] for n in graph.find_nodes(op="placeholder") if "param" in n.meta}
    params = {n: p for n, p in params.items() if p.kind != "constant" or n in kept}
    unseen = dict.fromkeys(exported.unseen) if mesh.size("ep") > 1 else ()
    notes = (*exported.notes, *(f"{why}; every rank of ep computes all of it for its own rows" for why in unseen))
    program = fold(Program(mesh, graph, {}, params, inputs, outputs, rows, Form.TRACED, notes))
    constants = {n: v for n, v in exported.constants.items() if n in kept}
    return Traced(program, exported.structure, constants, notes, exported.left)


def global_inputs(
    structure: Structure,
    tensors: list[Tensor],
    mesh: Mesh,
    rows: tuple[int, ...] | None,
    batch_dims: BatchDims | None,
) -> tuple[tuple[Input, ...], tuple[int, ...]]:
    """The inputs with the global batch in place of one data rank's, and the rows of each data rank."""
    dims = batch_dims_of(structure, tensors, batch_dims)
    own = next((t.shape[d] for t, d in zip(tensors, dims) if d is not None), None)
    if own is None:
        return tuple(Input(n, Spec(tuple(t.shape), t.dtype), None) for n, t in zip(structure.names, tensors)), ()
    rows = (own,) * mesh.data_size if rows is None else tuple(rows)
    if len(rows) != mesh.data_size:
        _refuse(f"rows {rows}: {len(rows)} counts for {mesh.data_size} data ranks", "give one count for each data rank")
    inputs = []
    for name, t, d in zip(structure.names, tensors, dims):
        size = [sum(rows) if i == d else n for i, n in enumerate(t.shape)]
        inputs.append(Input(name, Spec(tuple(size), t.dtype), d))
    return tuple(inputs), rows


def batch_dims_of(
    structure: Structure,
    tensors: list[Tensor],
    given: BatchDims | None,
    found: Mapping[str, int | None] | None = None,
) -> list[int | None]:
    """The batch dim of each input, None for those without. Raises AutoparError ``batch-dims``.

    ``found``: what an earlier call said of inputs by name; it stands, whatever sizes happen to be equal now.
    """
    if given is None or isinstance(given, Mapping):
        unknown = sorted(set(given or {}) - set(structure.names))
        if unknown:
            _refuse(f"batch_dims: no input is named {', '.join(unknown)}", f"names: {', '.join(structure.names)}")
        dims = _default_dims(structure.names, tensors, {**(found or {}), **(given or {})})
    else:
        dims = list(given)
    if len(dims) != len(tensors):
        _refuse(f"batch_dims: {len(dims)} for {len(tensors)} inputs", f"in order: {', '.join(structure.names)}")
    for name, t, d in zip(structure.names, tensors, dims):
        if d is not None and not 0 <= d < t.ndim:
            _refuse(f"{name}: batch dim {d} of {t.ndim} dims", f"give a dim in 0..{t.ndim - 1}, or None")
    lengths = {n: t.shape[d] for n, t, d in zip(structure.names, tensors, dims) if d is not None}
    if len(set(lengths.values())) > 1:
        earlier = [n for n in lengths if n in (found or {}) and not (isinstance(given, Mapping) and n in given)]
        fix = "give every batched input as many rows"
        if earlier:
            fix += (
                f"; {', '.join(earlier)} had as many at the first call: batch_dims={{name: None}} for what is no batch"
            )
        _refuse(f"batch dims of different length: {lengths}", fix)
    return dims


def _default_dims(names: tuple[str, ...], tensors: list[Tensor], known: Mapping[str, int | None]) -> list[int | None]:
    """The known batch dims, and dim 0 of other inputs that are as long as the first of those that may have one."""
    pairs = [(t, known.get(n, 0)) for n, t in zip(names, tensors) if t.ndim]
    first = next((t.shape[d] for t, d in pairs if d is not None and 0 <= d < t.ndim), None)
    return [known[n] if n in known else 0 if t.ndim and t.shape[0] == first else None for n, t in zip(names, tensors)]


def _refuse(message: str, fix: str) -> NoReturn:
    raise AutoparError("batch-dims", message, fix)


def _outputs(
    graph: fx.Graph, exported: Exported, inputs: tuple[Input, ...], rows: tuple[int, ...]
) -> tuple[Output, ...]:
    """What each result is; results in the order user, loss, buffer."""
    end = graph.output_node()
    order = sorted(range(len(exported.outputs)), key=lambda i: ("user", "loss", "buffer").index(exported.outputs[i][0]))
    results: Any = end.args[0]
    nodes = [results[i] for i in order]
    end.args = (tuple(nodes),)
    batched = _depends_on_batch(graph, inputs)
    out = []
    for i, node in zip(order, nodes):
        kind, name = exported.outputs[i]
        size = node.meta["spec"].shape
        has = kind == "user" and bool(rows) and node in batched and bool(size) and size[0] == sum(rows)
        out.append(Output(kind, name, 0 if has else None))
    return tuple(out)


def _depends_on_batch(graph: fx.Graph, inputs: tuple[Input, ...]) -> set[fx.Node]:
    found = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "input" in node.meta and inputs[node.meta["input"]].batch_dim is not None:
                found.add(node)
        elif any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
