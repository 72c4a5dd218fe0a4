"""From a model and a way of calling it to a program for a rank; each way is compiled once."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autopar.cost.hardware import load
from autopar.errors import AutoparError, tell
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.modules import named, once
from autopar.ir.placement import Placement
from autopar.ir.program import Program
from autopar.ir.units import users_of
from autopar.passes.base import Context
from autopar.passes.choices import microbatches_of, passes_of
from autopar.passes.pipeline import Record, parse, run
from autopar.passes.placed import placed
from autopar.passes.planned import plan
from autopar.passes.zero import Zero
from autopar.runtime.agreement import LIMIT, checksum, fingerprint, identity
from autopar.runtime.garbage import uncollected
from autopar.solve.batch import settle_outputs
from autopar.strategy import Strategy
from autopar.trace import Structure, Traced, trace
from autopar.trace.blueprint import blueprint
from autopar.trace.carried import State
from autopar.trace.leaves import Same, objects
from autopar.trace.tracing import batch_dims_of

Loss = Callable[[Any], Tensor]
OnPass = Callable[[str, Program], None]
MANY = 16  # traces after which the user is told of them


class Agree(Protocol):
    """Exchanges what must be equal between ranks; see ``runtime.agreement.Agreement``."""

    def __call__(self, text: str, rows: int | None, same: int = 0, own: int = 0) -> tuple[int, ...]:
        """The rows of every data rank."""


@dataclass
class Variant:
    """A LOCAL program for one way of calling the model, and what it was before ``localize``: equal on all ranks."""

    program: Program
    structure: Structure
    constants: dict[str, Tensor]
    plans: tuple[Program, ...]
    records: list[Record] = field(default_factory=list)
    prologue: Program | None = None  # LOCAL: what a step in microbatches computes once, from all rows

    @property
    def microbatches(self) -> int:
        """How often a step runs the program."""
        return self.program.mesh.microbatches


def lower(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    strategy: Strategy | str | None = None,
    *,
    loss: Loss | None = None,
    after: str | None = None,
    rank: int = 0,
    train: bool | None = None,
    loss_only: bool = False,
    on_pass: OnPass | None = None,
) -> Program:
    """The program of ``rank`` after the pass ``after`` (all passes where None), from one data rank's example inputs.

    ``loss_only``: that of a training step, which makes no output that nobody reads, where the model has a loss.
    """
    strategy = Strategy.of(strategy)
    traced = trace_in(
        precision_of(strategy), model, args, kwargs,
        mesh=mesh, loss=loss, train=model.training if train is None else train,
    )  # fmt: skip
    program = settle_outputs(traced.program)
    program = only_loss(program) if loss_only else program
    if on_pass:
        on_pass("trace", program)
    if after == "trace":
        return program
    context = Context(load(strategy.hardware), strict=strategy.strict)
    steps, why = microbatches_of(strategy, program)
    if mesh.size("pp") > 1:
        program = replace(program, notes=(*program.notes, *why))
    for p in passes_of(strategy, mesh, steps):
        context.at = program.mesh.coordinates(rank)
        program = run(program, [p], context)
        if on_pass:
            on_pass(p.name, program)
        if p.name == after:
            break
    tell(context.warnings)
    return program


def precision_of(strategy: Strategy) -> str:
    """The precision that the strategy computes in."""
    return next((p.precision for p in parse(strategy.pipeline) if isinstance(p, Zero)), "fp32")


def trace_in(
    precision: str, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], **options: Any
) -> Traced:
    """The trace of a model that computes in ``precision``; its parameters keep their own dtypes in the table.

    In bf16 it is that of the model with bfloat16 in place of float32 parameters and inputs, buffers as they are: what
    the model's own code widens (norms, softmax, losses) stays wide.
    """
    if precision == "fp32":
        return trace(model, args, kwargs, **options)
    dtypes = {n: p.dtype for n, p in model.named_parameters(remove_duplicate=False)}
    args, kwargs = tree_map(_lowered, (args, dict(kwargs)))
    traced = trace(blueprint(model, torch.bfloat16), args, kwargs, **options)
    for name, param in traced.program.params.items():
        if name in dtypes and param.kind == "parameter":
            traced.program.params[name] = replace(param, spec=replace(param.spec, dtype=dtypes[name]))
    return traced


def _lowered(x: Any) -> Any:
    return x.to(torch.bfloat16) if isinstance(x, Tensor) and x.dtype == torch.float32 else x


class Compiler:
    """Compiles each way of calling a model once, keeping the parameters' layouts from the first.

    Args:
        model: only its structure, shapes and mode flags are read.
        at: this rank's coordinates on the mesh of a planned program.
        agree: exchanges a fingerprint and this rank's rows; returns the rows of every data rank, or raises on every
        rank.
        rewrite: applied to each trace before the passes.
        placement: where the experts of some layers are, by path.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        strategy: Strategy,
        *,
        at: Callable[[Mesh], Mapping[str, int]],
        agree: Agree,
        loss: Loss | None = None,
        batch_dims: Any = None,
        rewrite: Callable[[Traced], Traced] = lambda traced: traced,
        placement: Mapping[str, Placement] | None = None,
    ) -> None:
        self.model, self.mesh, self.strategy = model, mesh, strategy
        self.at, self.agree, self.loss, self.batch_dims, self.rewrite = at, agree, loss, batch_dims, rewrite
        self.placement = dict(sorted((placement or {}).items()))
        self.identity = identity(model)
        self.variants: dict[Any, Variant] = {}
        self.traces: dict[Any, Traced] = {}
        self.pinned: dict[str, Layout] = {}
        self.pinned_mesh: Mesh | None = None
        self.unread: frozenset[str] | None = None  # parameters that the first trace did not read
        self.pinned_stages: dict[str, tuple[int, ...]] = {}
        self.modes: Callable[[], Mapping[str, bool]] | None = None  # train or eval of each module, by path
        self.dims: dict[str, int | None] = {}  # batch dim of each input by name, as found at its first call
        self.objects: dict[Same, int] = {}  # objects among the inputs by when they came, which ranks compare
        self.said: set[str] = set()
        self.states: list[State | None] = [None]  # what calls left in the model's attributes, each once
        self.state = 0  # which of them the next call meets
        self.next: dict[Any, int] = {}  # which of them a call leaves, by what it is and what it meets

    def variant(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool, loss_only: bool, grad: bool
    ) -> Variant:
        """The variant for a call; compiled where it is new. Collective: every rank calls it with its own rows."""
        here = self.state, self._key(args, kwargs, train, "loss" if loss_only else "outputs")
        if (here, loss_only) not in self.variants:
            with uncollected():
                self.variants[here, loss_only] = self._agreed(
                    lambda: self._compile(self._traced(here, args, kwargs), loss_only)
                )
        made = self.variants[here, loss_only]
        self._advance(here)
        if grad and not loss_only:
            self._tell(sums([v.program for v in self.variants.values()]))
        return made

    def example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool) -> Variant:
        """The variant of the example inputs: that of a training step where there is a loss. Collective."""
        here = self.state, self._key(args, kwargs, train, f"compile {self.identity}")

        def make() -> Variant:
            traced = self._traced(here, args, kwargs)
            loss_only = any(o.kind == "loss" for o in traced.program.outputs)
            return self.variants.setdefault((here, loss_only), self._compile(traced, loss_only))

        return self._agreed(make)

    def _advance(self, here: Any) -> None:
        """The call is made: what it leaves in attributes is what later traces begin with."""
        left = self.traces[here].left
        if left is not None and here not in self.next:
            alike = (i for i, known in enumerate(self.states) if known and known.same(left))
            self.next[here] = next(alike, len(self.states))
            if self.next[here] == len(self.states):
                self.states.append(left)
        self.state = self.next.get(here, self.state)

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool, what: str) -> Any:
        try:
            structure, tensors = Structure.of(self.model, args, kwargs)
            dims = batch_dims_of(structure, tensors, self.batch_dims, self.dims)
        except Exception as error:
            self._report(error)
            raise
        shapes = tuple(tuple(None if i == d else n for i, n in enumerate(t.shape)) for t, d in zip(tensors, dims))
        dtypes = tuple(str(t.dtype) for t in tensors)
        own = next((t.shape[d] for t, d in zip(tensors, dims) if d is not None), None)
        same = checksum(t for t, d in zip(tensors, dims) if d is None)
        mine = checksum((t for t, d in zip(tensors, dims) if d is not None), LIMIT)
        flags = self._flags(train)
        came = [self.objects.setdefault(o, len(self.objects)) for o in objects(structure.key)]
        rows = self.agree(fingerprint(structure.key, came, shapes, dtypes, flags, what), own, same, mine)
        for name, t, d in zip(structure.names, tensors, dims):
            if t.ndim:
                self.dims.setdefault(name, d)
        return structure.key, shapes, dtypes, rows if own is not None else None, flags

    def _flags(self, train: bool) -> tuple[bool, ...]:
        """Train or eval of each of the model's modules: its own, or that of the nearest one that holds it."""
        if self.modes is None:
            return tuple(m.training for m in once(self.model))
        known = {**self.modes(), "": train}
        flags: dict[str, bool] = {}
        for name in named(self.model):
            flags[name] = known.get(name, flags.get(name.rpartition(".")[0], train))
        return tuple(flags.values())

    def _traced(self, here: tuple[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
        if here not in self.traces:
            _check_call(self.model, args, kwargs)
            state, (*_, rows, flags) = here
            structure, tensors = Structure.of(self.model, args, kwargs)
            dims = batch_dims_of(structure, tensors, self.batch_dims, self.dims)
            with flagged(self.model, flags):
                traced = trace_in(
                    precision_of(self.strategy), self.model, args, kwargs,
                    mesh=self.mesh, rows=rows, loss=self.loss, batch_dims=dims, train=flags[0],
                    start=self.states[state],
                )  # fmt: skip
            self._tell(traced.notes)
            traced.program = settle_outputs(traced.program)
            self._check_written(traced)
            self.traces[here] = self.rewrite(traced)
            if len(self.traces) == MANY:
                self._tell([
                    f"the model was traced for {MANY} ways of calling it, each compiled and kept: shapes, numbers, "
                    "strings and callables among the inputs, modes, and what calls leave in attributes; pad to fewer "
                    "shapes, pass numbers as tensors, and the same callables"
                ])  # fmt: skip
        return self.traces[here]

    def _check_written(self, traced: Traced) -> None:
        """Tables that calls keep are computed from buffers anew, which must be what they were."""
        every = [t.program for t in (*self.traces.values(), traced)]
        written = {o.name for p in every for o in p.outputs if o.kind == "buffer"}
        states = filter(None, (*self.states, traced.left))
        heads = (n for s in states for n in s.recipe.find_nodes(op="placeholder"))
        if stale := sorted(written & {n.meta["param"] for n in heads}):
            why = f"{stale[0]}: the forward writes it, and keeps in an attribute what it computed from it once"
            raise AutoparError("python-state", why, "keep what is computed in a registered buffer")

    def _compile(self, traced: Traced, loss_only: bool) -> Variant:
        program = only_loss(traced.program) if loss_only else traced.program
        context = Context(load(self.strategy.hardware), self.pinned, self.strategy.strict, mesh=self.pinned_mesh)
        context.stages, context.unread = self.pinned_stages, self.unread or frozenset()
        records: list[Record] = []
        planned = plan(
            program, self.strategy, self.mesh, context, train=loss_only, records=records, whole=traced.program,
            own=program is not traced.program,
        )  # fmt: skip
        program, prologue = planned.local(context, self.at, records)
        program = placed(program, self.placement)
        self._tell(context.warnings)
        for name, layout in planned.layouts.items():
            known = self.pinned.setdefault(name, layout)
            assert known is layout or known == layout, name
        self.pinned_stages |= {name: p.stages for name, p in program.params.items() if p.stages}
        self.pinned_mesh = replace(program.mesh, microbatches=1)
        if self.unread is None:
            self.unread = frozenset(program.params.keys() - users_of(program).keys())
        return Variant(program, traced.structure, traced.constants, planned.programs, records, prologue)

    def _agreed(self, make: Callable[[], Variant]) -> Variant:
        """What ``make`` returns, once every rank has made the same plan; an error anywhere is an error everywhere."""
        try:
            made = make()
        except Exception as error:
            self._report(error)
            raise
        parts = (t for p in made.plans for t in (plan_text(p), str(p.stages)))
        self.agree(fingerprint(*parts, str(self.placement)), None)
        return made

    def _report(self, error: Exception) -> None:
        """Let the other ranks know; if all fail alike each raises its own error."""
        try:
            self.agree(f"failed: {error}"[:200], None)
        except AutoparError as other:
            if other.slug != "rank-mismatch":
                raise

    def _tell(self, messages: Iterable[str]) -> None:
        new = [m for m in dict.fromkeys(messages) if m not in self.said]
        self.said.update(new)
        tell(new)


@contextmanager
def flagged(model: nn.Module, flags: tuple[bool, ...]) -> Iterator[None]:
    """While the context lasts, the model's modules are in the given modes."""
    before = [(m, m.training) for m in once(model)]
    try:
        for (module, old), flag in zip(before, flags, strict=True):
            if old != flag:  # to set an attribute of a module takes long
                module.training = flag
        yield
    finally:
        for module, flag in before:
            if module.training != flag:
                module.training = flag


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        fix = "pass what the model's forward takes"
        raise AutoparError("input-structure", f"inputs of {type(model).__name__}: {error}", fix) from None


def sums(programs: list[Program]) -> list[str]:
    """What to know before a gradient is taken through an output of a model that has no loss, on several data ranks."""
    ways = programs[0].mesh.data_size
    learns = any(p.kind == "parameter" and p.trainable for p in programs[0].params.values())
    if ways == 1 or not learns or any(o.kind == "loss" for p in programs for o in p.outputs):
        return []
    return [
        "the model has no loss, and gradients of one that is computed from its outputs are added up over data ranks: "
        f"the mean of each rank's rows gives {ways} times the gradient of the mean of all rows; pass loss= to "
        "parallelize and call train_step, or divide by the global count"
    ]


def plan_text(program: Program) -> str:
    """Layouts of every value and parameter, as text: equal on ranks that planned alike."""
    lines: list[str] = []
    known: dict[int, str] = {}  # of what many nodes share

    def text(value: Any) -> str:
        if id(value) not in known:
            known[id(value)] = str(value)
        return known[id(value)]

    for name, graph in program.graphs():
        for n in graph.nodes:
            spec, layout, stage = (n.meta.get(key) for key in ("spec", "layout", "stage"))
            made = f"{n} = {n.target}{n.args}" if n.op == "call_module" else n.format_node() or n.args
            lines.append(f"{name} {made} {text(spec)} {text(layout)} {stage}")
    alike: dict[Any, list[str]] = {}
    for p in program.params.values():
        key = (p.spec, p.layout, p.kind, p.trainable, p.persistent, p.tied, p.chunk, p.stages, p.order)
        alike.setdefault(key, []).append(p.name)
    lines += [f"{key} {' '.join(names)}" for key, names in alike.items()]
    return "\n".join(lines)


def only_loss(program: Program) -> Program:
    """The program without the model's outputs: the loss and the buffers' new values, and what they need."""
    if not any(o.kind == "loss" for o in program.outputs):
        return program
    program = program.clone()
    out = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    keep = [i for i, o in enumerate(program.outputs) if o.kind != "user"]
    out.args = (tuple(out.args[0][i] for i in keep),)
    program.outputs = tuple(program.outputs[i] for i in keep)
    for node in reversed(list(program.graph.nodes)):
        if not node.users and node.op not in ("output", "placeholder"):
            program.graph.erase_node(node)
    used = {str(call.target) for call in program.calls()}
    return replace(program, blocks={n: b for n, b in program.blocks.items() if n in used})
