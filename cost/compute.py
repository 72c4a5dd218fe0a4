"""Flops and bytes moved by each op, forward and backward, and the seconds they take.

A cost is computed from the shapes that a rank sees (``Shapes``), so local costs, global ones and closed forms are one
function. A multiply-add is 2 flops. Bytes are those read and written in device memory by one kernel an op, without
fusion, which eager execution does. Views are free.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost.hardware import Hardware
from autopar.cost.local import STEPS
from autopar.cost.symbols import Number, maximum, product, ratio
from autopar.ir import ops
from autopar.ir.program import Spec, specs, tensor_args
from autopar.runtime import loss, random
from autopar.runtime.ring import ring_attention, whole_attention


@dataclass(frozen=True)
class Value:
    """A tensor as one rank holds it; sizes may be expressions."""

    shape: tuple[Number, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> Number:
        """Elements."""
        return product(self.shape)

    @property
    def bytes(self) -> Number:
        """Bytes."""
        return self.numel * self.dtype.itemsize


Shapes = Callable[[fx.Node], tuple[Value | None, ...]]


@dataclass(frozen=True)
class NodeCost:
    """Cost of one op on one rank. Flops and bytes; ``kind`` is matmul, attention, memory or free.

    ``matmul`` holds (m, n, k) of each of the equal matmuls, on which efficiency depends; of attention the sizes of a
    head's query and value. ``beside``: bytes that launches of their own move, forward and backward.
    """

    flops: Number = 0
    bytes: Number = 0
    backward_flops: Number = 0
    backward_bytes: Number = 0
    kind: str = "free"
    matmul: tuple[Number, Number, Number] | None = None
    beside: tuple[Number, Number] = (0, 0)


FREE = NodeCost()
ATTENTIONS = (*ops.ATTENTION, random.attention_with_dropout, ring_attention, whole_attention)


def words(text: str) -> frozenset[str]:
    """A set of op names, written with spaces between."""
    return frozenset(text.split())


_VIEWS = words(
    "view reshape _unsafe_view expand permute transpose t unsqueeze squeeze slice select split split_with_sizes chunk "
    "unbind alias detach lift_fresh narrow flatten unflatten movedim swapaxes as_strided view_as_complex view_as_real"
)


def global_values(node: fx.Node) -> tuple[Value | None, ...]:
    """The node's values as one unsharded device holds them."""
    return tuple(Value(s.shape, s.dtype) if isinstance(s, Spec) else None for s in specs(node))


def op_name(node: fx.Node) -> str:
    """``linear`` for ``aten.linear.default``, the function's name for others, "" for what is no call."""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else target.__name__


def is_view(node: fx.Node) -> bool:
    """Whether the result shares the memory of its first input, or of one of its results."""
    return op_name(node) in _VIEWS or op_name(node) == "getitem"


def differentiable(node: fx.Node) -> bool:
    """Whether a gradient may flow through the value; ``diff`` where the program says, else every float."""
    known = node.meta.get("diff")
    return any(s is not None and s.is_float for s in specs(node)) if known is None else bool(known)


def node_cost(node: fx.Node, shapes: Shapes = global_values) -> NodeCost:
    """Cost of the op at ``node`` for the shapes that ``shapes`` gives of its inputs and outputs.

    Matmuls, convolutions and attention by their formula; every other op is priced by the bytes of its tensors and one
    flop an element. Conversions and block calls are free here: ``communication`` and ``program`` price them.
    """
    if node.op != "call_function" or is_view(node) or node.target is ops.convert or node.target in STEPS:
        return FREE
    if node.target in ATTENTIONS:
        return _attention(node, shapes)
    if node.target is ops.experts:
        from autopar.cost.experts import cost  # which is made of the costs here

        return cost(node, shapes)
    formula = _MATMULS.get(op_name(node))
    return formula(node, shapes) if formula else _memory(node, shapes)


def seconds(cost: NodeCost, hardware: Hardware, dtype: torch.dtype) -> tuple[Number, Number]:
    """Roofline seconds, forward and backward: the longer of arithmetic and memory traffic."""
    if cost.kind == "free":
        return 0, 0
    peak = hardware.flops_per_second(dtype)
    forward, backward = (peak, peak)
    if cost.kind == "attention":
        forward, backward = (peak * e for e in hardware.attention(cost.matmul or ()))
    elif cost.matmul is not None:
        forward = backward = peak * efficiency(cost.matmul, hardware)
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    rows = bandwidth * hardware.rows
    return (
        maximum(cost.flops / forward, cost.bytes / bandwidth) + cost.beside[0] / rows,
        maximum(cost.backward_flops / backward, cost.backward_bytes / bandwidth) + cost.beside[1] / rows,
    )


def efficiency(matmul: Sequence[Number], hardware: Hardware) -> Number:
    """Share of peak that a matmul of dims (m, n, k) reaches: E · Π d / (d + h) over the three dims.

    E and h are the profile's ``matmul_efficiency`` and ``matmul_half``, fitted to published kernel measurements
    (SimuMax configs/system @4dcaae5). The form is symmetric, so the two matmuls of a backward reach as much.
    """
    return hardware.matmul_efficiency * product(d / (d + hardware.matmul_half) for d in matmul)


def bound(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names of the op's signature, defaults filled in."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        call = inspect.signature(target).bind(*node.args, **node.kwargs)
        call.apply_defaults()
        return dict(call.arguments)
    names = [a.name for a in target._schema.arguments]
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    return {**defaults, **dict(zip(names, node.args)), **node.kwargs}


def dropout_of(args: dict[str, Any]) -> float:
    """The probability at which an attention with these arguments drops entries."""
    dropped: float = args["p"] if "p" in args else args.get("dropout", 0.0)
    return dropped


def _of(node: fx.Node, shapes: Shapes) -> Value:
    value = shapes(node)[0]
    assert value is not None, node
    return value


def _traffic(node: fx.Node, shapes: Shapes) -> tuple[Number, Number]:
    """Bytes read and written by one pass over every input and output, and those of inputs that take a gradient."""
    read = [(n, _of(n, shapes).bytes) for n in tensor_args(node)]
    made = sum(v.bytes for v in shapes(node) if v is not None)
    return made + sum(b for _, b in read), sum(b for n, b in read if differentiable(n))


def _memory(node: fx.Node, shapes: Shapes) -> NodeCost:
    """An op bound by memory. Backward: read the gradient and the inputs again, write the inputs' gradients."""
    traffic, gradients = _traffic(node, shapes)
    if node.target in (torch.ops.aten.embedding.default, loss.vocabulary_embedding):
        return _embedding(node, shapes)
    values = [v for v in shapes(node) if v is not None]
    work = maximum(*(v.numel for v in (*values, *(_of(n, shapes) for n in tensor_args(node)))), 0)
    if not differentiable(node):
        return NodeCost(work, traffic, kind="memory")
    return NodeCost(work, traffic, work, traffic + gradients, kind="memory")


def _embedding(node: fx.Node, shapes: Shapes) -> NodeCost:
    """A lookup reads the rows that it takes; its gradient writes the whole table once and adds the rows."""
    table, ids = (_of(n, shapes) for n in tensor_args(node)[:2])
    rows = _of(node, shapes).bytes
    trained = differentiable(tensor_args(node)[0])
    backward = (_of(node, shapes).numel, 2 * rows + table.bytes) if trained else (0, 0)
    return NodeCost(0, 2 * rows + ids.bytes, *backward, kind="memory")


def _matmul(node: fx.Node, shapes: Shapes, a: fx.Node, b: fx.Node, dims: tuple[Number, Number, Number]) -> NodeCost:
    """``batch`` equal matmuls m×k · k×n; each input that takes a gradient costs one more matmul in the backward."""
    out = _of(node, shapes)
    m, n, k = dims
    flops = 2 * out.numel * k
    moved = _of(a, shapes).bytes + _of(b, shapes).bytes + out.bytes
    wanted = sum(map(differentiable, (a, b))) if differentiable(node) else 0
    return NodeCost(flops, moved, wanted * flops, wanted * moved, "matmul", (m, n, k))


def factors(node: fx.Node) -> list[fx.Node]:
    """The two factors of a matmul or a convolution."""
    args = bound(node)
    return [args["input"], args["weight"]] if "weight" in args else tensor_args(node)[-2:]


def _linear(node: fx.Node, shapes: Shapes) -> NodeCost:
    args = bound(node)
    x, weight, out = args["input"], args["weight"], _of(node, shapes)
    k = _of(x, shapes).shape[-1]
    return _matmul(node, shapes, x, weight, (product(out.shape[:-1]), out.shape[-1], k))


def _plain_matmul(node: fx.Node, shapes: Shapes) -> NodeCost:
    """mm, bmm, matmul, addmm, baddbmm: the last two tensors of the arguments, [..., m, k] and [..., k, n]."""
    a, b = tensor_args(node)[-2:]
    left, right = _of(a, shapes), _of(b, shapes)
    m = left.shape[-2] if len(left.shape) > 1 else 1
    if len(left.shape) > 2 and len(right.shape) == 2:
        m = product(left.shape[:-1])
    n = right.shape[-1] if len(right.shape) > 1 else 1
    return _matmul(node, shapes, a, b, (m, n, left.shape[-1]))


def _convolution(node: fx.Node, shapes: Shapes) -> NodeCost:
    """Weight [out, in / groups, *kernel] as a matmul of its receptive field."""
    args = bound(node)
    weight, out = _of(args["weight"], shapes), _of(node, shapes)
    field = product(weight.shape[1:])
    rows = product((out.shape[0], *out.shape[2:]))
    return _matmul(node, shapes, args["input"], args["weight"], (rows, out.shape[1], field))


def _keys(node: fx.Node, args: Mapping[str, Any], k: Value) -> Number:
    """How many keys a query sees at most: in a ring, those of all ranks."""
    if node.target is ring_attention:
        return sum(length for held in args["keys"] for _, length in held)
    whole = specs(args["k"])[0] if node.target is ops.ring_attention else None
    return k.shape[-2] if whole is None else whole.shape[-2]


def _seen(flops: Number, args: Mapping[str, Any], keys: Number) -> Number:
    """What is left of the flops: half where causal, a window's part of the keys."""
    low, high = args.get("band") or (None, None)
    if low is not None and high is not None and not (isinstance(keys, int) and high - low >= keys):
        return ratio(flops * (high - low + 1), keys)
    return ratio(flops, 2) if args["is_causal"] or low == 0 else flops


def _attention(node: fx.Node, shapes: Shapes) -> NodeCost:
    """Fused attention; with dropout, unfused attention.

    Fused: two matmuls forward, five backward, no S×T traffic, half of all that where causal (arXiv:2307.08691,
    sections 2.3 and 4.1). With dropout the probabilities are made whole: nothing is skipped, the backward has four
    matmuls, and scores, probabilities and their mask pass through memory.
    """
    args = bound(node)
    q, k, v = (_of(args[name], shapes) for name in ("q", "k", "v"))
    out = _of(node, shapes)
    square = product(q.shape[:-1]) * _keys(node, args, k)
    heads = (q.shape[-1], v.shape[-1], 1)
    flops = 2 * square * (q.shape[-1] + v.shape[-1])
    moved = q.bytes + k.bytes + v.bytes + out.bytes
    for name in ("mask", "bias"):
        if args.get(name) is not None:
            moved = moved + _of(args[name], shapes).bytes
    if not dropout_of(args):
        flops = _seen(flops, args, _keys(node, args, k))
        cost, back = NodeCost(flops, moved, ratio(5 * flops, 2), 2 * moved, "attention", heads), differentiable(node)
    else:
        # Written and read once each: scores, probabilities, dropped probabilities; the mask is a byte an entry. In the
        # backward a product, the dropout and the softmax write a gradient each; six reads, and one of the mask.
        size, back = q.dtype.itemsize, differentiable(node)
        whole = 2 * moved + square * (9 * size + 1)
        cost = NodeCost(flops, moved + square * (6 * size + 2), 2 * flops, whole, "attention", heads)
    return cost if back else NodeCost(cost.flops, cost.bytes, kind="attention", matmul=heads)


_MATMULS: dict[str, Callable[[fx.Node, Shapes], NodeCost]] = {
    "linear": _linear,
    **dict.fromkeys(("mm", "bmm", "matmul", "addmm", "baddbmm"), _plain_matmul),
    **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d"), _convolution),
}
