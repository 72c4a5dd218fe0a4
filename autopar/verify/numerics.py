"""autopar.verify: every rank in one process, compared with the unsharded model on the global batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.compile import Variant, only_loss
from autopar.cost.hardware import load
from autopar.emit.across import Across
from autopar.emit.module import ParallelModule
from autopar.emit.params import Place, initialise
from autopar.errors import AutoparError
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.ir.ops import drawn
from autopar.ir.placement import Placement
from autopar.ir.program import Program
from autopar.passes.base import Context
from autopar.passes.placed import placed
from autopar.passes.planned import Planned, plan
from autopar.runtime.random import Streams
from autopar.runtime.simulate import device_mesh, run_ranks
from autopar.solve.batch import settle_outputs
from autopar.strategy import Strategy
from autopar.trace import Structure, Traced, trace
from autopar.trace.blueprint import copied
from autopar.trace.flat import loss_of
from autopar.trace.structure import scan
from autopar.trace.tracing import batch_dims_of
from autopar.verify.order import check_order
from autopar.verify.widen import WIDE, quiet, wide, widen

NOISE = 1e-4  # of the largest gradient: smaller ones are measured against this (key biases' are zero but for rounding)
FAITHFUL = 1e-4  # the traced program against the model itself, both in the model's own dtypes
GRADIENT = 1e-3  # their gradients: sums over rows and positions, in float32


@dataclass
class Report:
    """Relative error of every tensor: max|Δ| over the largest value of the unsharded one.

    ``errors`` holds ``loss``, ``output.N``, ``grad.NAME``, ``buffer.NAME`` (the worst rank of each) and ``trace.N``,
    ``trace.grad.NAME`` and the like, the traced program against the model in eager mode. ``ok`` if all are within
    tolerance.
    """

    errors: dict[str, float]
    tolerance: float
    mesh: str
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> dict[str, float]:
        """The errors that are over tolerance."""
        return {n: e for n, e in self.errors.items() if not e <= self._bound(n)}

    def _bound(self, name: str) -> float:
        if not name.startswith("trace."):
            return self.tolerance
        return GRADIENT if is_grad(name.removeprefix("trace.")) else FAITHFUL

    @property
    def ok(self) -> bool:
        """Whether the parallel module equals the unsharded model."""
        return not self.failed

    def __str__(self) -> str:
        exact = {n: e for n, e in self.errors.items() if not n.startswith("trace")}
        worst = max(exact, key=lambda n: exact[n], default="")
        head = f"mesh {self.mesh}: {len(exact)} tensors, largest relative error {exact.get(worst, 0.0):.2e} ({worst})"
        lines = [f"{head}, tolerance {self.tolerance:.0e}: {'equal' if self.ok else 'DIFFERENT'}"]
        lines += [f"  {n}: {e:.3e}" for n, e in sorted(self.failed.items(), key=lambda x: -x[1])]
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


def verify(
    model: nn.Module,
    mesh: DeviceMesh | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    batch_dims: Any = None,
    strategy: Strategy | str | None = None,
    fp64: bool = True,
    tolerance: float | None = None,
    placement: Mapping[str, Placement] | None = None,
) -> Report:
    """Compare loss, outputs, every gradient and every buffer of all ranks with the unsharded model.

    Runs the real per-rank code of each rank in a thread of this process. Dropout is off in both, and noise constant.

    Args:
        args, kwargs: the global batch.
        fp64: compute in double precision in both, explicit casts to float32 included.
        tolerance: 1e-10 in fp64, else 1e-4.
        placement: as in ``parallelize``.
    """
    sizes = (
        Mesh.of(dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape)))
        if isinstance(mesh, DeviceMesh)
        else Mesh.parse(mesh)
    )
    bench = _Bench(model, sizes, args, dict(kwargs or {}), loss, batch_dims, Strategy.of(strategy), fp64)
    bench.placement = placement
    with wide() if fp64 else nullcontext():
        return bench.report(tolerance if tolerance is not None else (1e-10 if fp64 else 1e-4))


class _Bench:
    """One comparison: the reference, and the ranks."""

    def __init__(self, model, sizes, args, kwargs, loss, batch_dims, strategy, fp64):  # type: ignore[no-untyped-def]
        self.sizes, self.strategy = sizes, strategy
        self.placement: Mapping[str, Placement] | None = None
        structure, self.inputs = Structure.of(model, args, kwargs)
        self.dims = batch_dims_of(structure, self.inputs, batch_dims)
        total = next((t.shape[d] for t, d in zip(self.inputs, self.dims) if d is not None), sizes.data_size)
        self.rows = tuple(len(t) for t in torch.arange(total).tensor_split(sizes.data_size))
        args0, kwargs0 = structure.unflatten(self.cut(0))
        self.plain = trace(
            model, args0, kwargs0, mesh=sizes, rows=self.rows, loss=loss, batch_dims=self.dims, train=model.training
        )
        self.plain.program = settle_outputs(self.plain.program)
        self.notes = [*self.plain.notes]
        self.model = copied(model)
        self.faithful = self._trace_errors(structure, loss)
        self.traced = quiet(self.plain)
        if fp64:
            self.model, self.traced = self.model._apply(lambda t: t.to(WIDE.get(t.dtype, t.dtype))), widen(self.traced)
            self.inputs = [t.to(WIDE.get(t.dtype, t.dtype)) for t in self.inputs]
        if sizes.size("pp") > 1 and not any(o.kind == "loss" for o in self.plain.program.outputs):
            why = f"mesh {sizes}: the model has no loss, and only a training step of a pipeline has gradients"
            raise AutoparError("no-loss", why, "pass loss= to verify, or labels")
        self.structure = structure

    def cut(self, index: int) -> list[Tensor]:
        """The inputs of data rank ``index``."""
        return [
            t if d is None else t.tensor_split(self.sizes.data_size, d)[index] for t, d in zip(self.inputs, self.dims)
        ]

    def values(self, model: nn.Module, traced: Traced) -> dict[str, Tensor]:
        """Copies of the model's tensors by first name, parameters as leaves."""
        table = dict(model.named_parameters()) | dict(model.named_buffers()) | traced.constants
        return {
            n: table[n].detach().clone().requires_grad_(p.kind == "parameter" and table[n].requires_grad)
            for n, p in traced.program.params.items()
        }

    def _trace_errors(self, structure: Structure, loss: Callable[[Any], Tensor] | None) -> dict[str, float]:
        """The traced program against the model itself, with its own gradients, unless it draws random numbers."""
        program = self.plain.program
        if _draws(program):
            self.notes.append(
                "dropout is off and noise constant in this comparison, and the trace is not compared with the model"
            )
            return {}
        model, values = copied(self.model), self.values(self.model, self.plain)
        with torch.enable_grad():
            results = self._eager(model, structure, loss)
            grads = lambda: {n: p.grad for n, p in model.named_parameters() if p.requires_grad}  # noqa: E731
            want = self.collect(program, results, grads)
            traced = evaluate(program, values, [t.clone() for t in self.inputs])
            got = self.collect(program, traced, lambda: {n: v.grad for n, v in values.items() if v.requires_grad})
        want |= {f"buffer.{n}": b for n, b in model.named_buffers()}
        exact = all(p.dtype not in (torch.float16, torch.bfloat16) for p in model.parameters())
        names = [n for n in got if n in want and (exact or n.startswith("output."))]
        largest = _largest(want[n] for n in names if is_grad(n))
        return {
            f"trace.{n.removeprefix('output.')}": relative(got[n], want[n], NOISE * largest if is_grad(n) else 0.0)
            for n in names
        }

    def _eager(self, model: nn.Module, structure: Structure, loss: Callable[[Any], Tensor] | None) -> list[Tensor]:
        """The model's own outputs and loss, in the order of the program's."""
        args, kwargs = structure.unflatten([t.clone() for t in self.inputs])
        out, found = model(*args, **kwargs), []  # type: tuple[Any, list[Tensor]]
        value = loss_of(loss, out, scan(out, found, lambda value: None), found)
        return found if value is None else [*found, value]

    def report(self, tolerance: float) -> Report:
        """Run and compare."""
        want = self.reference()
        plans = self.plans()
        local = [{only: self.lower(plan, rank) for only, plan in plans.items()} for rank in range(self.sizes.world)]
        for only in plans:
            check_order(variants[only].program for variants in local)
            check_order(p for variants in local if (p := variants[only].prologue) is not None)
        found = run_ranks(self.sizes, lambda rank: self.rank(rank, local[rank]))
        errors: dict[str, float] = {}
        largest = _largest(g for n, g in want.items() if n.startswith("grad."))
        for rank, got in enumerate(found):
            for name, value in got.items():
                expected = self.expected(name, want[name.removeprefix("step.")], rank)
                least = NOISE * largest if name.startswith("grad.") else 0.0
                errors[name] = max(errors.get(name, 0.0), relative(value, expected, least))
        missing = [n for n in want if n not in errors]
        errors.update(dict.fromkeys(missing, float("inf")))
        return Report({**errors, **self.faithful}, tolerance, str(self.sizes), self.notes)

    def plans(self) -> dict[bool, Planned]:
        """The programs of a training step (True) and of a call, the same on all ranks."""
        whole, hardware = self.traced.program, load(self.strategy.hardware)
        context = Context(hardware, strict=self.strategy.strict)
        trains = any(o.kind == "loss" for o in whole.outputs)
        step = plan(only_loss(whole), self.strategy, self.sizes, context, train=trains, exact=True, whole=whole)
        mesh = replace(step.main.mesh, microbatches=1)
        stages = {n: p.stages for n, p in step.main.params.items() if p.stages}
        context = Context(hardware, step.layouts, self.strategy.strict, mesh=mesh, stages=stages)
        return {True: step, False: plan(whole, self.strategy, self.sizes, context, train=False, exact=True)}

    def reference(self) -> dict[str, Tensor | None]:
        """Loss, outputs, gradients and buffers of the whole program."""
        values = self.values(self.model, self.traced)
        outputs = evaluate(self.traced.program, values, [t.clone() for t in self.inputs])
        return self.collect(
            self.traced.program, outputs, lambda: {n: v.grad for n, v in values.items() if v.requires_grad}
        )

    def collect(
        self,
        program: Program,
        outputs: Sequence[Tensor],
        grads: Callable[[], Mapping[str, Tensor | None]],
        backward: bool = True,
    ) -> dict[str, Tensor | None]:
        """Named tensors of one run; the backward starts at the loss, or at every float output."""
        out: dict[str, Tensor | None] = {}
        for i, (o, value) in enumerate(zip(program.outputs, outputs)):
            out[{"user": f"output.{i}", "loss": "loss", "buffer": f"buffer.{o.name}"}[o.kind]] = value.detach()
        if not backward:
            return out
        start = [v for v, o in zip(outputs, program.outputs) if o.kind == "loss"] or [
            (v * cotangent(v)).sum() for v, o in zip(outputs, program.outputs) if o.kind == "user" and v.requires_grad
        ]
        if start and any(s.requires_grad for s in start):
            torch.stack([s for s in start if s.requires_grad]).sum().backward()
        return out | {f"grad.{n}": g for n, g in grads().items()}

    def expected(self, name: str, whole: Tensor | None, rank: int) -> Tensor | None:
        """What the rank should have of a reference tensor: its rows of a batched output."""
        if whole is None or not name.startswith("output."):
            return whole
        output = self.traced.program.outputs[int(name.removeprefix("output."))]
        if output.batch_dim is None:
            return whole
        return whole.tensor_split(self.sizes.data_size, output.batch_dim)[self.data_rank(rank)]

    def data_rank(self, rank: int) -> int:
        """The part of the batch that a rank reads."""
        return self.sizes.data_rank(self.sizes.coordinates(rank))

    def lower(self, plan: Planned, rank: int) -> Variant:
        """The rank's own programs."""
        program, prologue = plan.local(Context(load(self.strategy.hardware)), lambda mesh: mesh.coordinates(rank))
        program = placed(program, self.placement)
        return Variant(program, self.plain.structure, self.traced.constants, plan.programs, prologue=prologue)

    def rank(self, rank: int, variants: Mapping[bool, Variant]) -> dict[str, Tensor | None]:
        """Everything that one rank computes, whole gradients included."""
        structure, program, mesh = self.plain.structure, variants[False].program, variants[True].program.mesh
        place = Place.of(mesh, device_mesh(mesh))
        held = Across.of(program, place).held()
        tensors = initialise(self.model, held, place, self.traced.constants)
        handles = {**place.axes, "rng": Streams(0)}
        pm = ParallelModule(_Fixed(variants), program, place, tensors, handles, self.placement)
        pm.train(self.model.training)
        args, kwargs = structure.unflatten(self.cut(self.data_rank(rank)))
        has_loss = any(o.kind == "loss" for o in program.outputs)
        before = {n: b.detach().clone() for n, b in pm.named_buffers()}
        with torch.enable_grad():
            out = self.collect(
                program, pm._run(args, kwargs, loss_only=False)[1], pm.full_gradients, backward=not has_loss
            )
            if has_loss:
                for n, b in pm.named_buffers():
                    b.copy_(before[n])
                out["loss"] = pm.train_step(*args, **kwargs)
                out |= {f"grad.{n}": g for n, g in pm.full_gradients().items()}
                moved = {o.name for o in program.outputs if o.kind == "buffer"}
                out |= {f"step.buffer.{n}": b for n, b in pm.named_buffers() if n in moved}
        trainable = {f"grad.{n}" for n, p in pm.named_parameters() if p.requires_grad}
        return {n: t for n, t in out.items() if not n.startswith("grad.") or n in trainable}


class _Fixed:
    """A compiler that has its programs already."""

    def __init__(self, variants: Mapping[bool, Variant]) -> None:
        self.variants = variants

    def variant(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool, loss_only: bool, grad: bool
    ) -> Variant:
        return self.variants[loss_only]


def _draws(program: Program) -> bool:
    return any(drawn(n) for _, graph in program.graphs() for n in graph.nodes if n.op == "call_function")


def cotangent(x: Tensor) -> Tensor:
    """Fixed, uneven weights that depend on the values' place within a row only, so that ranks agree."""
    shape = x.shape[1:]
    return torch.cos(torch.arange(shape.numel(), dtype=x.dtype)).reshape(shape)


def is_grad(name: str) -> bool:
    """Whether the tensor of that name in a report is a gradient."""
    return name.startswith("grad.")


def _largest(values: Iterable[Tensor | None]) -> float:
    """The largest element of all; 0 for none."""
    return max((float(v.abs().max()) for v in values if v is not None and v.numel()), default=0.0)


def relative(got: Tensor | None, want: Tensor | None, least: float = 0.0) -> float:
    """max|Δ| / max|want| (or / ``least`` if that is more); infinite where one is missing or shapes differ."""
    if got is None or want is None:
        other = got if want is None else want
        return 0.0 if other is None or not other.any() else float("inf")
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = (torch.view_as_real(t) if t.is_complex() else t for t in (got.resolve_conj(), want.resolve_conj()))
    got, want = got.detach().to(torch.float64), want.detach().to(torch.float64)
    if bool((torch.isfinite(got) != torch.isfinite(want)).any()):
        return float("inf")
    finite = torch.isfinite(want)
    delta = (got - want).where(finite, torch.zeros(())).abs().max()
    largest = max(float(want.where(finite, torch.zeros(())).abs().max()), least)
    return float(delta) / largest if largest > 0 else float(delta)
