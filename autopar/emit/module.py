"""The module that parallelize returns: the model's names, this rank's shards, one function for each kind of layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.checkpoint.live import Live
from autopar.checkpoint.methods import Checkpoints
from autopar.checkpoint.safetensors import config_of
from autopar.emit.across import Across
from autopar.emit.emitted import Emitted, Variant, emit
from autopar.emit.engine import engine_of, start
from autopar.emit.named import Root
from autopar.emit.norms import clip_gradients
from autopar.emit.params import Place, gather_of, shard_of
from autopar.emit.pipelined import Pipelined
from autopar.emit.source import body_of, source
from autopar.emit.state import load
from autopar.emit.steps import Moving, loss_of, parts, widened
from autopar.emit.units import skeleton
from autopar.errors import AutoparError
from autopar.ir.mesh import TIME
from autopar.ir.placement import Placement
from autopar.ir.printer import print_program
from autopar.ir.program import Output, Param, Program
from autopar.ir.units import paths_of
from autopar.runtime.collectives import all_reduce_invariant
from autopar.runtime.heartbeat import guarded
from autopar.runtime.load import ExpertLoad, Loads
from autopar.runtime.random import Streams


class Compiler(Protocol):
    """Gives the program for a call; equal calls get the same object."""

    def variant(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool, loss_only: bool, grad: bool
    ) -> Variant:
        """The variant for a call of the model with ``args`` and ``kwargs``."""


class ParallelModule(Checkpoints, Root):
    """A model on a mesh: equal to the unsharded model on the global batch.

    Called as the model is, with this data rank's rows; returns the model's own output structure.

    Args:
        compiler: gives the variant for each call.
        program: LOCAL, any variant; it says which units there are.
        place: this rank on the mesh.
        tensors: this rank's parameters and buffers by first original name (``emit.params.initialise``).
        handles: values of the programs' handle placeholders: axes by name, and under "rng" the random Streams.
        placement: where the experts of some layers are, as the program's parameters have it.
    """

    def __init__(
        self,
        compiler: Compiler,
        program: Program,
        place: Place,
        tensors: Mapping[str, Tensor],
        handles: Mapping[str, Any],
        placement: Mapping[str, Placement] | None = None,
    ) -> None:
        super().__init__()
        self._loads = Loads.of(placement)
        self._place, self._compiler, self._program = place, compiler, program
        self._handles: Mapping[str, Any] = {**handles, "load": self._loads}
        self._across = Across.of(program, place)
        self._params: dict[str, Param] = self._across.held()
        self._skeleton = skeleton(self._params, tensors, paths_of(program))
        # The root unit is what engines hook; it is no child, so that names have no prefix, but shares this tree.
        root = self._skeleton.root
        self.__dict__.update(_modules=root._modules, _parameters=root._parameters, _buffers=root._buffers)
        self.__dict__.update(_non_persistent_buffers_set=root._non_persistent_buffers_set)
        self._engine = start(self._skeleton, self._params, engine_of(program), place)
        self._emitted: dict[int, tuple[Variant, Emitted]] = {}
        self._pipelined: dict[int, tuple[Variant, Pipelined]] = {}
        self._options: dict[str, Any] | None = None

    @guarded
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this data rank's rows, in the model's own structure.

        With a pipeline it takes no gradient, and where ``Strategy(outputs="last")`` says so, other ranks than those of
        the last stage get None.

        Raises:
            AutoparError: ``pipeline-forward`` with a pipeline, in training mode with gradients on.
        """
        if self._across.stages is not None:
            return self._forward_stages(args, kwargs)
        variant, values = self._run(args, kwargs, loss_only=False)
        kinds = (o.kind for o in variant.program.outputs)
        return variant.structure.rebuild([v for v, kind in zip(values, kinds) if kind != "buffer"])

    @guarded
    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward: adds to every ``.grad``, in the current train or eval mode.

        Returns:
            The global loss: detached, 0-d, plain, equal on every rank.

        Raises:
            AutoparError: ``no-loss`` where the model has none, ``no-gradient`` where nothing is trainable.
        """
        if self._across.stages is not None:
            return self._summed(self._train_stages(args, kwargs))
        with torch.enable_grad():
            variant, tensors = self._prepare(args, kwargs, loss_only=True)
            emitted = self._emit(variant)
            total: Tensor | None = None
            for inputs in parts(variant.program, tensors, self._prologue(variant), self._moving(variant)):
                last = self._moving(variant).coordinate == variant.program.mesh.microbatches - 1
                with self._engine.forward(keep=True):
                    values = self._skeleton.root(emitted.call, *inputs)
                    loss = loss_of(emitted.outputs, values)
                with self._engine.backward(last):
                    loss.backward()
                term = widened(loss.detach())
                total = term if total is None else total + term
        self._update_buffers(emitted.outputs, values)
        assert total is not None
        return self._summed(total)

    def _summed(self, total: Tensor) -> Tensor:
        """The loss of all data ranks."""
        for name in self._place.summed_axes:
            total = all_reduce_invariant(total, self._place.axes[name])
        return total

    def _train_stages(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """A step of the pipeline; gradients of parameters that several of its ranks hold are added up behind it."""
        with torch.enable_grad():
            variant, tensors = self._prepare(args, kwargs, loss_only=True)
            rows = list(parts(variant.program, tensors, self._prologue(variant), self._moving(variant)))
            pipelined = self._stage(variant)
            tied = {n: p for n, p in self._trainable() if any(n == t.name for t in self._across.tied())}
            before = {n: p.grad for n, p in tied.items()}
            try:
                for p in tied.values():
                    p.grad = None
                loss, values = pipelined.train(rows)
            except BaseException:
                for n, p in tied.items():
                    p.grad = before[n]
                raise
        self._across.add_tied(dict(self._trainable()))
        for n, p in self._trainable():
            if (old := before.get(n)) is not None:
                p.grad = old if p.grad is None else p.grad.add_(old)
        self._update_buffers([variant.program.outputs[i] for i in values], list(values.values()))
        return loss

    def _forward_stages(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.training and torch.is_grad_enabled():
            why = "a call of the module with gradients on; with a pipeline, only a training step has a backward"
            fix = "use train_step for gradients, or eval(), or torch.no_grad()"
            raise AutoparError("pipeline-forward", why, fix)
        variant, values = self._run(args, kwargs, loss_only=False)
        if any(v is None for v in values):
            return None
        kinds = (o.kind for o in variant.program.outputs)
        return variant.structure.rebuild([v for v, kind in zip(values, kinds) if kind != "buffer"])

    def _prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_only: bool
    ) -> tuple[Variant, list[Tensor]]:
        grad = torch.is_grad_enabled()
        variant = self._compiler.variant(args, kwargs, train=self.training, loss_only=loss_only, grad=grad)
        self._moving(variant)
        if isinstance(streams := self._handles.get("rng"), Streams):
            streams.advance()
        self._loads.reset()
        tensors = variant.structure.flatten(args, kwargs)
        if self._across.stages is not None and any(t.requires_grad for t in tensors):
            why = "an input takes a gradient, which a pipeline does not give"
            raise AutoparError("input-gradient", why, "detach the inputs, or use a mesh without pp")
        if self._engine.plan.precision == "fp32":
            return variant, tensors
        inputs = variant.program.inputs
        return variant, [t.to(i.spec.dtype) if t.is_floating_point() else t for t, i in zip(tensors, inputs)]

    def _moving(self, variant: Variant) -> Moving:
        """The handle of the microbatch that runs."""
        if TIME not in self._handles:
            self._handles = {**self._handles, TIME: Moving()}
        moving: Moving = self._handles[TIME]
        moving.size = variant.program.mesh.microbatches
        return moving

    def _prologue(self, variant: Variant) -> Callable[[list[Tensor]], list[Tensor]] | None:
        """What a step in microbatches computes once, from all rows."""
        program = getattr(variant, "prologue", None)
        if program is None:
            return None
        if id(program) not in self._emitted:
            own = getattr(variant, "constants", None)
            made = emit(program, self._skeleton, self._engine, self._place, self._handles, own)
            self._emitted[id(program)] = (variant, made)
        call = self._emitted[id(program)][1].call
        return lambda tensors: list(call(tuple(tensors)))

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_only: bool) -> tuple[Variant, list[Any]]:
        variant, tensors = self._prepare(args, kwargs, loss_only)
        if self._across.stages is not None:
            every = getattr(getattr(self._compiler, "strategy", None), "outputs", "every") == "every"
            with self._engine.forward():
                found = self._stage(variant).forward(tensors, every)
            values = [found.get(i) for i in range(len(variant.program.outputs))]
        else:
            emitted = self._emit(variant)
            with self._engine.forward():
                values = self._skeleton.root(emitted.call, *tensors)
        self._update_buffers(variant.program.outputs, values)
        return variant, values

    def _update_buffers(self, outputs: Sequence[Output], values: Sequence[Any]) -> None:
        for output, value in zip(outputs, values):
            if output.kind == "buffer":
                self._update(output.name, value)

    def _emit(self, variant: Variant) -> Emitted:
        """The variant's functions, made at its first call."""
        if id(variant) not in self._emitted:
            own = getattr(variant, "constants", None)
            made = emit(variant.program, self._skeleton, self._engine, self._place, self._handles, own)
            self._emitted[id(variant)] = (variant, made)
        made = self._emitted[id(variant)][1]
        if self._options is not None:
            made.compile(**self._options)
        return made

    def _stage(self, variant: Variant) -> Pipelined:
        """The variant's stages on this rank, made at its first call."""
        if id(variant) not in self._pipelined:
            own, moving = getattr(variant, "constants", None), self._moving(variant)
            made = Pipelined(variant.program, self._skeleton, self._engine, self._place, self._handles, moving, own)
            self._pipelined[id(variant)] = (variant, made)
        made = self._pipelined[id(variant)][1]
        if self._options is not None:
            made.compile(**self._options)
        return made

    def _update(self, name: str, value: Tensor) -> None:
        """A buffer's new value. The old tensor is left alone, since the backward may read it."""
        param = self._params[name]
        for alias in (name, *param.tied):
            _, table, key = self._skeleton.tables[alias]
            old = table[key]
            new = value.detach().to(old.dtype, copy=True)
            if shard_of(old).shape == old.shape and type(old) is Tensor:
                table[key] = new
            else:
                shard_of(old).copy_(new)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As any module's: each parameter once, by its first original name."""
        self._engine.heal()
        return super().named_parameters(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add up this data rank's own gradients; the next one outside reduces their sum.

        ``.grad`` changes in that one only. As DDP's, but for parameters that no engine holds, which are always reduced.
        """
        return self._engine.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any module's; also drops what backwards under ``no_sync`` left to be reduced."""
        self._engine.forget()
        super().zero_grad(set_to_none)

    @guarded
    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole, by first original name. Collective."""
        return dict(self._across.wholes(dict(self._trainable()).get, self._parameters_everywhere()))

    @guarded
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient, whole, by first original name; None where there is none. Collective."""
        grads, params = {n: p.grad for n, p in self._trainable()}, self._parameters_everywhere()
        there = dict(
            zip((p.name for p in params), self._across.anywhere(grads.get(p.name) is not None for p in params))
        )
        found = dict(self._across.wholes(grads.get, [p for p in params if there[p.name]]))
        return {p.name: found.get(p.name) for p in params}

    def _parameters_everywhere(self) -> list[Param]:
        return [p for p in self._across.params.values() if p.kind == "parameter"]

    def _trainable(self) -> Iterator[tuple[str, Tensor]]:
        self._engine.heal()
        for name, param in self._params.items():
            if param.kind == "parameter":
                _, table, key = self._skeleton.tables[name]
                yield name, table[key]

    @guarded
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``. Collective.

        Each element counts once, whatever ranks hold it and however many names it has.

        Returns:
            The norm before scaling: 0-d, plain, equal on every rank.

        Raises:
            AutoparError: ``bad-norm`` where ``norm_type`` is not positive.
            RuntimeError: where the norm is not finite and ``error_if_nonfinite``.
        """
        pairs = [(self._params[n], p) for n, p in self._trainable()]
        return clip_gradients(pairs, self._across, max_norm, norm_type, error_if_nonfinite)

    def expert_load(self) -> dict[str, ExpertLoad]:
        """Choices of each expert, and of each rank of ``ep``, in the last step, by path of the layer. Collective.

        Raises:
            AutoparError: ``no-load`` where no tokens travelled to experts.
        """
        return self._loads.total(self._place.axes, self._place.summed_axes)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy a state dict by original names: whole tensors, or DTensors of any placement. Collective with DTensors.

        Raises:
            AutoparError: ``state-dict-mismatch``, before anything is written, naming what is missing, unexpected or
                of another shape.
        """
        return load(self._skeleton, self._across, state_dict, strict)

    def _live(self) -> Live:
        self._engine.heal()
        agree = getattr(self._compiler, "agree", None)
        return Live.of(self._across, self._skeleton.tables, self._handles.get("rng"), agree)

    def _config(self) -> dict[str, Any] | None:
        return config_of(getattr(self._compiler, "model", None))

    def compile(self, **options: Any) -> None:
        """Run every kind of block, and what lies between them, through ``torch.compile``, each once.

        Args:
            options: of ``torch.compile``; by default ``fullgraph=True, dynamic=False``.
        """
        for _, staged in self._pipelined.values():
            staged.compile(**options)
        self._options = options
        for _, made in self._emitted.values():
            made.compile(**options)

    @property
    def streams(self) -> Streams:
        """The random state of dropout, equal on all ranks: ``state_dict()`` saves it, ``load_state_dict`` goes on."""
        streams: Streams = self._handles["rng"]
        return streams

    def dump(self, **options: Any) -> str:
        """Text of the program (``ir.printer.print_program``)."""
        return print_program(self._program, **options)

    def to_python(self) -> str:
        """Text of a Python file that runs the training step by itself under torchrun. Collective.

        It has the functions of the last variant that computes a loss, and cuts its weights from a state dict.
        """
        if self._across.stages is not None or self._loads.placed:
            why = "to_python writes one function for all ranks, and cuts weights in their own order"
            raise AutoparError("unsupported-export", why, "use a mesh without pp, and no placement of experts")
        losses = [v for v, _ in self._emitted.values() if any(o.kind == "loss" for o in v.program.outputs)]
        program = losses[-1].program if losses else self._program
        bodies = [body_of(program)]
        if self._place.mesh.world > 1:
            bodies *= self._place.mesh.world
            dist.all_gather_object(bodies, body_of(program))
        values = dict(self._unsaved(program, getattr(losses[-1], "constants", None) if losses else None))
        return source(self._place.mesh, program, bodies, values)

    def _unsaved(self, program: Program, constants: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """What no state dict has, whole: constants, and buffers that are not persistent."""
        for name, param in program.params.items():
            if param.kind == "constant" and name in (constants or {}):
                yield name, (constants or {})[name]
            elif param.kind != "parameter" and not (param.kind == "buffer" and param.persistent):
                _, table, key = self._skeleton.tables[name]
                yield name, gather_of(table[key], param, self._place)

    def _apply(self, fn: Any, recurse: bool = True) -> "ParallelModule":
        """Accepts moves and casts that change nothing. Raises AutoparError ``fixed-module``."""
        for dtype, device in {(p.dtype, p.device) for p in self.parameters()}:
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            if probe.dtype != dtype or probe.device != device:
                why = f"parameters are {dtype} on {device}; programs are compiled for that"
                raise AutoparError("fixed-module", why, "cast or move the model before parallelize")
        return self
