"""From a model to the families that the cost model searches: one trace, one lowering for each kind of layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from autopar.compile import Loss, only_loss, precision_of, trace_in
from autopar.cost.closed import Family
from autopar.cost.family import Primes, family
from autopar.cost.hardware import Hardware, load
from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.base import Context
from autopar.passes.microbatch import microbatch
from autopar.passes.pipeline import parse, run
from autopar.runtime.garbage import uncollected
from autopar.solve.batch import settle_outputs
from autopar.strategy import Strategy

WAYS = 4  # data ranks of the example
LONGEST = 4096  # positions of the example: closed forms hold for any number
Style = tuple[bool, bool]
Families = dict[tuple[bool | None, Style], Family]
PLAIN: Style = (False, False)


@dataclass(frozen=True)
class Example:
    """How a model is called, apart from how many rows and positions.

    Args:
        rows, positions: of the given inputs; positions None where no dim of them is a sequence.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int
    positions: int | None

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Example":
        """Rows are dim 0 of the first tensor; positions dim 1 of integer tensors, where all agree on it.

        Raises AutoparError ``input-structure`` where there is no tensor with rows.
        """
        tensors = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor) and t.ndim]
        if not tensors:
            raise AutoparError("input-structure", "no input has rows", "give example inputs with a batch dim")
        rows = tensors[0].shape[0]
        lengths = {t.shape[1] for t in tensors if t.ndim == 2 and t.shape[0] == rows}
        whole = all(t.ndim == 2 and not t.is_floating_point() for t in tensors if t.shape[0] == rows)
        positions = lengths.pop() if whole and len(lengths) == 1 else None
        return Example(tuple(args), kwargs, rows, positions if positions and positions > 1 else None)

    def with_rows(self, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs with so many rows, as zeros where they change."""

        def resize(x: Any) -> Any:
            fits = not isinstance(x, Tensor) or not x.ndim or x.shape[0] != self.rows or rows == self.rows
            return x if fits else x.new_zeros((rows, *x.shape[1:]))

        args, kwargs = tree_map(resize, (self.args, dict(self.kwargs)))
        return args, kwargs

    def sized(self, primes: Primes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of one of two data ranks with ``primes`` rows, and twice its positions."""
        return self.shaped(primes.rows, 2 * (primes.positions or 0))

    def shaped(self, rows: int, positions: int, device: str | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs with so many rows, and positions where there are any, as zeros on their own device or another."""

        def resize(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.ndim or x.shape[0] != self.rows:
                return x
            shape = [rows, *x.shape[1:]]
            if self.positions is not None and positions and x.ndim == 2:
                shape[1] = positions
            return x.new_zeros(shape, device=device)

        args, kwargs = tree_map(resize, (self.args, dict(self.kwargs)))
        return args, kwargs


def width_of(model: nn.Module) -> int:
    """Bytes of an element of the model's parameters."""
    return next((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), 4)


def families(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    hardware: Hardware | None = None,
    loss: Loss | None = None,
    precision: str = "bf16",
    styles: Sequence[Style] = (PLAIN,),
    alone: bool = False,
) -> Families:
    """Families by (sequence parallelism, style), a style being (fused, regather) of ``cost.family.family``.

    The model is traced once, without weights. Where its layouts do not hold on two tensor ranks, the only family is
    that of data parallelism. ``alone``: that one always, too, as None; without conversions between them, more of the
    ops of a fused style are neighbours. Raises AutoparError where the model cannot be traced.
    """
    machine = hardware or load(Strategy(precision=precision).hardware)
    given = {"loss": loss, "precision": precision, "styles": styles, "alone": alone}
    return families_on([machine], model, args, kwargs, **given)[0]  # type: ignore[arg-type]


def families_on(
    machines: Sequence[Hardware],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss: Loss | None = None,
    precision: str = "bf16",
    styles: Sequence[Style] = (PLAIN,),
    alone: bool = False,
) -> list[Families]:
    """``families`` on each of several profiles, of one trace."""
    sample = Sample.of(model, args, kwargs, loss=loss, precision=precision)
    return [sample.families(machine, styles, alone) for machine in machines]


@dataclass(frozen=True)
class Sample:
    """The trace that families are made of, with all outputs, and the sizes that tell its rows and positions."""

    program: Program
    primes: Primes

    @staticmethod
    def of(
        model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, loss: Loss | None = None,
        precision: str = "bf16",
    ) -> "Sample":  # fmt: skip
        """Of a model, which is traced without weights. Raises AutoparError where it cannot be traced."""
        example = Example.of(args, kwargs)
        sizes = {n for p in (*model.parameters(), *model.buffers()) for n in p.shape}
        longest = None if example.positions is None else min(max(example.positions, 64), LONGEST)
        primes = replace(Primes.apart(sizes, longest), ways=WAYS)
        with uncollected():
            inputs, low = example.sized(primes), precision_of(Strategy(precision=precision))
            mesh = Mesh.of({"dp": WAYS, "tp": 2})
            traced = trace_in(low, model, *inputs, mesh=mesh, loss=loss, train=model.training)
            return Sample(settle_outputs(traced.program), primes)

    def families(self, machine: Hardware, styles: Sequence[Style] = (PLAIN,), alone: bool = False) -> Families:
        """See ``families``."""
        program, primes = only_loss(self.program), self.primes
        with uncollected():
            if any(n.target is ops.experts for _, graph in program.graphs() for n in graph.nodes):
                primes = replace(primes, data=("dp", "ep"))
                program = replace(program, mesh=Mesh.of({"dp": WAYS // 2, "ep": 2, "tp": 2}))
            return _families(program, primes, Context(machine), styles, alone)


def _families(program: Program, primes: Primes, context: Context, styles: Sequence[Style], alone: bool) -> Families:
    """Of a trace, with the layouts that a profile's prices choose."""
    parts = _in_parts(program, primes, context)
    rows = run(program, parse("data-parallel,expert-parallel"), context)
    out: Families = {}
    for sequence in (False, True) if primes.positions is not None else (False,):
        lowered = _lowered(rows, sequence, context)
        if lowered is None:
            continue
        for fused, regather in styles:
            made = family(lowered, primes, sequence=sequence, fused=fused, regather=regather, parts=parts)
            out[sequence, (fused, regather)] = made
    only = not any(sequence is False for sequence, _ in out)
    if only or alone:
        lowered = run(rows, parse("reshard"), context)
        for fused, regather in styles:
            made = _only_data(family(lowered, primes, fused=fused, regather=regather, parts=parts))
            out.update({(key, (fused, regather)): made for key in (False,) * only + (None,) * alone})
    return out


def _in_parts(program: Program, primes: Primes, context: Context) -> bool:
    """Whether a step can run in microbatches: nothing that depends on parameters couples rows."""
    try:
        microbatch(program, primes.rows, context)
    except AutoparError as error:
        if error.slug != "batch-coupled-loss":
            raise
        return False
    return True


def _lowered(program: Program, sequence: bool, context: Context) -> Program | None:
    """The program with its layouts on two tensor ranks; None where the model's sizes do not allow it."""
    tensor = "tensor-parallel{sequence}" if sequence else "tensor-parallel"
    try:
        return run(program, parse(f"{tensor},reshard"), context)
    except AutoparError as error:
        if error.slug not in ("indivisible-dim", "indivisible-heads", "no-plan", "infeasible"):
            raise
        return None


def _only_data(made: Family) -> Family:
    """A family that allows no tensor ranks: a prime that divides no larger size."""
    return replace(made, divisors={**made.divisors, "tp": frozenset({1})})
