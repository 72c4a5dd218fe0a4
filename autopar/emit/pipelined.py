"""A program in stages on one rank: its own stages, the schedule of a step, and a forward through all of them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from autopar.cost.schedule import SPLIT, check_legal
from autopar.emit.across import Across
from autopar.emit.emitted import Emitted, emit
from autopar.emit.engine import Engine
from autopar.emit.params import Place
from autopar.emit.stage import Body, Stage
from autopar.emit.steps import Moving, no_loss, widened
from autopar.emit.units import Skeleton
from autopar.errors import AutoparError
from autopar.ir.program import Program, Spec, Stages
from autopar.ir.stages import Part, grads, parts_of

CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


class Pipelined:
    """What this rank runs of a staged program.

    Args:
        program: LOCAL, with stages.
        handles: as for ``emit``.
        constants: as for ``emit``.
    """

    def __init__(
        self, program: Program, skeleton: Skeleton, engine: Engine, place: Place, handles: Mapping[str, Any],
        moving: Moving, constants: Mapping[str, Tensor] | None,
    ) -> None:  # fmt: skip
        assert program.stages is not None
        self.program, self.engine, self.plan = program, engine, program.stages
        self.across = Across.of(program, place)
        parts = parts_of(program)
        self.homes = {i: self.plan.ranks[part.index] for part in parts for i in part.outputs}
        self.emitted: list[Emitted] = []
        self.stages: list[Stage] = []
        self.learns = bool(grads(program) & set(_results(program)))
        split = self.plan.schedule in SPLIT
        for index in self.plan.of(self.across.me):
            made = emit(parts[index].program(program), skeleton, engine, place, handles, constants, alone=split)
            body = Body(partial(skeleton.root, made.call), _loss_place(program, parts[index]))
            stage = Stage(parts[index], body, len(parts), self.across.group, place.device, engine, moving)
            stage.stage_index_to_group_rank = dict(enumerate(self.plan.ranks))
            self.emitted.append(made)
            self.stages.append(stage)
        self._schedules: dict[int, Any] = {}

    def compile(self, **options: Any) -> None:
        """``torch.compile`` each stage's functions. Raises AutoparError ``split-backward``."""
        if self.plan.schedule in SPLIT:
            why = f"schedule {self.plan.schedule} runs a backward in two parts, which compiled code has not"
            raise AutoparError("split-backward", why, "use schedule=1f1b or interleaved, or do not compile")
        for made in self.emitted:
            made.compile(**options)

    def train(self, rows: list[list[Tensor]]) -> tuple[Tensor, dict[int, Tensor]]:
        """Forward and backward of every microbatch; the sum of the losses, and other outputs. Collective over ``pp``.

        Args:
            rows: the inputs of each microbatch, in the order of ``Program.inputs``.
        """
        kinds = [o.kind for o in self.program.outputs]
        if "loss" not in kinds:
            results = zip(_results(self.program), self.program.outputs)
            raise no_loss([len(_spec(r).shape) for r, o in results if o.kind == "user"])
        if not self.learns:
            raise AutoparError("no-gradient", "the loss depends on no trainable parameter", "unfreeze a parameter")
        for stage in self.stages:
            stage.inputs = rows
        schedule = self._schedule(len(rows))
        try:
            with self.engine.pipelined(self.plan.schedule in SPLIT):
                # The target is what makes a schedule ask for the loss, which the last stage has computed.
                schedule.step(target=torch.zeros(len(rows)), return_outputs=False)
        except BaseException:
            self._schedules.clear()  # they remember messages that never came
            raise
        at, spec = kinds.index("loss"), _spec(_results(self.program)[kinds.index("loss")])
        last = self.stages[-1] if self.stages[-1].is_last else None
        total = None
        if last is not None:
            terms = [widened(last.losses[m]) for m in range(len(rows))]
            total = torch.stack(terms).sum() if len(terms) > 1 else terms[0]
        dtype = widened(torch.empty((), dtype=spec.dtype)).dtype
        loss = self.across.share(total, spec.shape, dtype, self.plan.ranks[-1])
        return loss, self._shared(lambda i: i != at)

    def forward(self, tensors: list[Tensor], every: bool) -> dict[int, Tensor]:
        """The outputs by place, of one pass through all stages. Collective over ``pp``.

        Args:
            every: whether every rank gets all of them, or those with the last stage alone.
        """
        pending: list[dist.Work] = []
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.inputs = [tensors]
        with torch.no_grad():
            for stage in self.stages:
                self._receive(stage)
                made = stage.forward_one_chunk(0)
                following = next((s for s in self.stages if s.stage_index == stage.stage_index + 1), None)
                if following is not None:
                    following.set_local_fwd_input(made, 0)
                elif not stage.is_last:
                    pending += _post(stage.get_fwd_send_ops(0))
                stage.runs.clear()
        for work in pending:
            work.wait()
        end = self.plan.ranks[-1]
        buffers = [i for i, o in enumerate(self.program.outputs) if o.kind == "buffer"]
        found = {**self._own(), **self._shared(lambda i: every or self.homes[i] != end or i in buffers)}
        return found if every or self.across.me == end else {i: found[i] for i in buffers}

    def _receive(self, stage: Stage) -> None:
        if not stage.is_first and self.plan.ranks[stage.stage_index - 1] != self.across.me:
            for work in _post(stage.get_fwd_recv_ops(0)):
                work.wait()

    def _own(self) -> dict[int, Tensor]:
        """The outputs that this rank's stages made last."""
        return {i: x for stage in self.stages for i, x in zip(stage.part.outputs, stage.results)}

    def _shared(self, wanted: Callable[[int], bool]) -> dict[int, Tensor]:
        """Outputs on every rank of the pipeline."""
        own, results = self._own(), _results(self.program)
        out = {}
        for i in filter(wanted, range(len(results))):
            spec = _spec(results[i])
            out[i] = self.across.share(own.get(i), spec.shape, spec.dtype, self.homes[i])
        return out

    def _schedule(self, microbatches: int) -> Any:
        """The schedule; made once for each number of microbatches."""
        if microbatches not in self._schedules:
            name = _runnable(self.plan, microbatches)
            kind: Any = get_schedule_class(CLASSES[name])
            stages: Any = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
            made = kind(stages, microbatches, loss_fn=lambda output, target: output, scale_grads=False)
            self._schedules[microbatches] = made
        return self._schedules[microbatches]


def _runnable(plan: Stages, microbatches: int) -> str:
    """The plan's schedule, or one of the same placement where a step has too few microbatches for it."""
    ranks = len(set(plan.ranks))
    try:
        check_legal(plan.schedule, ranks, len(plan.ranks) // ranks, microbatches)
    except AutoparError:
        return {"1f1b": "gpipe", "dualpipev": "zbv"}[plan.schedule]
    return plan.schedule


def _results(program: Program) -> list[Any]:
    out = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    return list(out.args[0])


def _spec(node: Any) -> Spec:
    spec = node.meta["spec"]
    assert isinstance(spec, Spec)
    return spec


def _loss_place(program: Program, part: Part) -> int | None:
    """Where among a stage's own outputs the loss is."""
    return next((k for k, i in enumerate(part.outputs) if program.outputs[i].kind == "loss"), None)


def _post(ops: list[Any]) -> list[dist.Work]:
    return dist.batch_isend_irecv(ops) if ops else []
