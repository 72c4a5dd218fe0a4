"""A stage as the schedules of ``torch.distributed.pipelining`` run it.

Everything that the stock stage finds out at run time is known here: what is sent, in which shapes, and what takes a
gradient. The stock one runs the model once more to infer it, lets inputs in on the first stage only, and knows
``fully_shard`` by its module; so of its base class only the interface is used.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from autopar.emit.engine import Engine
from autopar.emit.split import Rest, backward_inputs
from autopar.emit.steps import Moving
from autopar.errors import AutoparError
from autopar.ir.stages import Crossing, Part
from autopar.runtime._functional import to_wire

WIDTH = 256  # tags of one message: its values are told apart


@dataclass
class _Run:
    """A microbatch between its forward and its backward: ``grads`` is None where the root is the loss."""

    leaves: list[Tensor]
    roots: list[Tensor]
    places: list[int]  # of the roots among the sent values
    grads: list[Tensor] | None = None
    rest: Rest | None = None


@dataclass
class Body:
    """What a stage runs.

    Args:
        run: from values in the order of ``Part.inputs`` and ``Part.received`` to those of ``sent`` and ``outputs``.
        loss: place of the loss among the results, in the stage that has it.
    """

    run: Callable[..., Sequence[Tensor]]
    loss: int | None = None


class Stage(_PipelineStageBase):
    """One stage on this rank.

    Args:
        count: stages in all.
        group: the ranks of the pipeline.
        moving: is set to the microbatch that runs, in forward and backward.
    """

    def __init__(
        self, part: Part, body: Body, count: int, group: dist.ProcessGroup, device: torch.device, engine: Engine,
        moving: Moving,
    ) -> None:  # fmt: skip
        super().__init__(nn.Module(), part.index, count, device, group)
        self.part, self.body, self.engine, self.moving = part, body, engine, moving
        self.inputs: list[list[Tensor]] = []
        self.results: list[Tensor] = []  # of the last microbatch
        self.losses: dict[int, Tensor] = {}
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        """Forget what a step that failed left behind."""
        self.taken: dict[int, list[Tensor]] = {}
        self.made: dict[int, list[Tensor]] = {}
        self.runs: dict[int, _Run] = {}
        self.grads_in: dict[int, list[Tensor | None]] = {}
        self.grads_out: dict[int, list[Tensor | None]] = {}
        self.losses.clear()

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> None:
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _ops(self, op: Any, tensors: Iterable[Tensor | None], other: int, microbatch: int) -> list[Any]:
        """A message to or from another stage, a value each; every value of a step has a tag of its own."""
        forward = (other > self.stage_index) == (op is dist.isend)
        first = ((microbatch * self.num_stages + min(other, self.stage_index)) * 2 + forward) * WIDTH
        sent = [(first + i, to_wire(t)) for i, t in enumerate(tensors) if t is not None and t.numel()]
        peer = self.stage_index_to_group_rank.get(other)
        return [dist.P2POp(op, t, group=self.group, tag=tag, group_peer=peer) for tag, t in sent]

    def _buffers(self, values: Iterable[Crossing], grads: bool) -> list[Any]:
        return [
            torch.empty(v.spec.shape, dtype=v.spec.dtype, device=self.device) if v.grad or not grads else None
            for v in values
        ]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what the stage before made."""
        self.taken[fwd_chunk_id] = taken = self._buffers(self.part.received, False)
        return self._ops(dist.irecv, taken, self.stage_index - 1, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what this stage made."""
        made = self.made.pop(fwd_chunk_id, [])
        return self._ops(dist.isend, made, self.stage_index + 1, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of what this stage sent."""
        self.grads_in[bwd_chunk_id] = grads = self._buffers(self.part.sent, True)
        return self._ops(dist.irecv, grads, self.stage_index + 1, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what this stage received."""
        grads = self.grads_out.pop(bwd_chunk_id, [])
        return self._ops(dist.isend, grads, self.stage_index - 1, bwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take what the stage before made on this same rank."""
        self.taken[mb_index] = list(prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """The gradients of what this stage took from the one before on this same rank."""
        return tuple(self.grads_out.pop(mb_index))

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients from the next stage on this same rank."""
        self.grads_in[mb_index] = list(next_stage_bwd_outputs)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run a microbatch; the values that are sent, or the loss."""
        self.moving.coordinate = fwd_chunk_id
        taken = self.taken.pop(fwd_chunk_id, [])
        leaves = [x.requires_grad_() for x, v in zip(taken, self.part.received) if v.grad and torch.is_grad_enabled()]
        own = [self.inputs[fwd_chunk_id][i] for i in self.part.inputs]
        with self.engine.forward(keep=True):
            results = [_free(x) for x in self.body.run(*own, *taken)]
        sent, rest = results[: len(self.part.sent)], results[len(self.part.sent) :]
        self._check(sent)
        places = [i for i, x in enumerate(sent) if x.requires_grad]
        self.runs[fwd_chunk_id] = run = _Run(leaves, [sent[i] for i in places], places)
        self.results = [x.detach() for x in rest]
        made = [x.detach().contiguous() for x in sent]
        if self.body.loss is not None:
            loss = rest[self.body.loss]
            run.roots, run.grads = [loss], [torch.ones_like(loss)]
            self.losses[fwd_chunk_id] = loss.detach()
            return self.losses[fwd_chunk_id]
        if not self.is_last and self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
            self.made[fwd_chunk_id] = made
        return tuple(made)

    def _check(self, sent: Iterable[Tensor]) -> None:
        for x, value in zip(sent, self.part.sent):
            if x.requires_grad and not value.grad:
                why = (
                    f"stage {self.stage_index}: {value.name} takes a gradient, but was compiled with frozen parameters"
                )
                raise AutoparError("frozen-stage", why, "unfreeze parameters before parallelize")

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a microbatch, or the part of it that gives the gradients of what was received."""
        run = self.runs[bwd_chunk_id]
        self.moving.coordinate = bwd_chunk_id
        if run.grads is None:
            given = self.grads_in.pop(bwd_chunk_id, [])
            run.grads = [g for i in run.places if (g := given[i]) is not None]
        split = not full_backward and bool(run.leaves) and bool(run.roots)
        with self.engine.backward(last=False):
            if split:
                run.rest = backward_inputs(run.roots, run.grads, run.leaves)
            elif full_backward and run.roots:
                torch.autograd.backward(run.roots, run.grads)
        if full_backward:
            del self.runs[bwd_chunk_id]
        if not self.is_first:
            self.grads_out[bwd_chunk_id] = self._input_grads(run.leaves)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The rest of a backward in two parts; all of it where nothing received takes a gradient."""
        run = self.runs.pop(bwd_chunk_id)
        self.moving.coordinate = bwd_chunk_id
        with self.engine.backward(last=False):
            if run.rest is not None:
                run.rest.run()
            elif run.roots:
                torch.autograd.backward(run.roots, run.grads)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the engine reduces behind the schedule."""

    def _input_grads(self, leaves: list[Tensor]) -> list[Tensor | None]:
        """The gradients to send back: zeros where none reached a value that takes one."""
        found, out = iter(leaves), list[Tensor | None]()
        for value in self.part.received:
            if not value.grad:
                out.append(None)
                continue
            leaf = next(found)
            out.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous())
            leaf.grad = None
        return out


def _free(x: Tensor) -> Tensor:
    """A copy of a view: graphs are cut at stage outputs, which must own their memory."""
    return x.clone() if x._is_view() and x.requires_grad else x
