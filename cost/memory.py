"""Bytes that one rank holds: model states, and the activations that autograd saves.

Assumed of activations:

- each op saves what torch's own backward formula reads (the table below); an op that the table lacks is taken to save
  all its tensors;
- a saved value counts once however many ops read it, and views share the memory of what they view (a reshape that has
  to copy is not seen);
- parameters and the model's inputs are not counted: they are held anyway;
- attention is fused unless it drops probabilities, which it then keeps twice, in its inputs' dtype (a runtime that
  widens them keeps more); a dropout keeps a mask of one byte an element;
- all layers' activations are alive at once, at the end of the forward. Temporary buffers are not counted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost import experts
from autopar.cost.communication import collectives
from autopar.cost.compute import (
    ATTENTIONS,
    Shapes,
    Value,
    bound,
    differentiable,
    dropout_of,
    is_view,
    op_name,
    words,
)
from autopar.cost.local import IDENTITIES, STEPS
from autopar.cost.regime import Widths
from autopar.cost.symbols import Number, product, ratio
from autopar.ir import ops
from autopar.ir.layout import Shard
from autopar.ir.program import Program, tensor_args
from autopar.runtime import loss

MIXED_ADAM = Widths(2, 2, 12)
"""fp16 weights and gradients; fp32 master weights, momentum and variance (arXiv:1910.02054, section 3.1)."""


def adamw(dtype: torch.dtype) -> Widths:
    """``torch.optim.AdamW`` on parameters of ``dtype``: gradient and both moments in the same dtype."""
    return Widths(dtype.itemsize, dtype.itemsize, 2 * dtype.itemsize)


@dataclass(frozen=True)
class States:
    """Bytes of parameters, gradients and optimizer state on one rank."""

    parameters: Number = 0
    gradients: Number = 0
    optimizer: Number = 0

    @property
    def total(self) -> Number:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: "States") -> "States":
        return States(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def states(elements: Number, widths: Widths, zero: int = 0, ways: Number = 1) -> States:
    """Model states of ``elements`` parameters at a ZeRO stage over ``ways`` ranks.

    Stage 1 shards the optimizer state, 2 the gradients too, 3 the parameters too (arXiv:1910.02054, table 1).
    """
    share = [ratio(elements, ways) if zero >= stage else elements for stage in (3, 2, 1)]
    return States(share[0] * widths.parameter, share[1] * widths.gradient, share[2] * widths.optimizer)


@dataclass(frozen=True)
class Saved:
    """What one op keeps for its backward: tensors of the graph, and ``extra`` bytes of its own."""

    values: tuple[fx.Node, ...] = ()
    extra: Number = 0


_INPUT = words(
    "pow square gelu silu abs sin cos log log_sigmoid erf mish hardswish hardtanh hardsigmoid softplus clamp clamp_min "
    "clamp_max layer_norm native_layer_norm rms_norm group_norm leaky_relu elu glu amax amin max min prod var norm "
    "logsumexp linalg_vector_norm avg_pool2d extreme"
)
_OUTPUT = words(
    "exp expm1 sqrt rsqrt reciprocal sigmoid tanh relu softmax _softmax log_softmax _log_softmax log_sigmoid amax amin "
    "max min prod norm logsumexp linalg_vector_norm extreme extreme_at"
)
_INPUTS = words("maximum minimum atan2 mse_loss")
_NOTHING = words(
    "add sub rsub neg mean mean_of_total sum cat stack _to_copy to clone copy convert cumsum roll flip pad "
    "constant_pad_nd repeat lift_fresh_copy contiguous triu tril"
)
_BILINEAR = words("mul linear mm bmm matmul addmm baddbmm convolution conv1d conv2d conv3d")
_INDICES = {"embedding": 1, "vocabulary_embedding": 1, "index_select": 1, "masked_fill": 1, "where": 0}
_STATISTICS = {"group_norm": 2, "layer_norm": 2, "native_layer_norm": 2, "rms_norm": 1}


def saved(node: fx.Node, shapes: Shapes) -> Saved:
    """What autograd keeps of ``node`` for its backward; nothing where no gradient flows."""
    if node.op != "call_function" or is_view(node) or not differentiable(node) or node.target in STEPS:
        return Saved()
    if node.target in ATTENTIONS:
        return _attention(node, shapes)
    name, inputs = op_name(node), tensor_args(node)
    if name == "dropout":
        return Saved(extra=_first(node, shapes).numel)
    if node.target is ops.experts:
        return Saved(tuple(inputs[1:3]), experts.kept(node, shapes))
    if node.target in (ops.token_loss, loss.token_loss):
        # log-softmax of the logits, as F.cross_entropy keeps it.
        return Saved((inputs[1],), _first(inputs[0], shapes).bytes)
    if name in _INDICES:
        return Saved(tuple(inputs[_INDICES[name] : _INDICES[name] + 1]))
    if name in _BILINEAR or name == "div":
        return Saved(tuple(_operands(name, inputs)))
    if name in _INPUTS or name == "gather":
        return Saved(tuple(inputs))
    if name in _NOTHING:
        return Saved()
    if name in _INPUT or name in _OUTPUT:
        kept = (inputs[:1] if name in _INPUT else []) + ([node] if name in _OUTPUT else [])
        return Saved(tuple(kept), _statistics(node, name, shapes))
    return Saved((*inputs, node))


def _operands(name: str, inputs: list[fx.Node]) -> Iterator[fx.Node]:
    """Each factor of a product that the other factor's gradient needs; a quotient needs the divisor for both."""
    if name in ("addmm", "baddbmm"):
        inputs = inputs[1:]
    if len(inputs) < 2:
        return
    a, b = inputs[:2]
    if differentiable(b):
        yield a
    if differentiable(a) or (name == "div" and differentiable(b)):
        yield b


def _statistics(node: fx.Node, name: str, shapes: Shapes) -> Number:
    """Mean and reciprocal deviation of a norm, in fp32 or better."""
    if name not in _STATISTICS:
        return 0
    x, args = _first(tensor_args(node)[0], shapes), bound(node)
    if name == "group_norm":
        rows = x.shape[0] * args["num_groups"]
    else:
        rows = product(x.shape[: -len(args["normalized_shape"])])
    return rows * max(4, x.dtype.itemsize) * _STATISTICS[name]


def _attention(node: fx.Node, shapes: Shapes) -> Saved:
    args = bound(node)
    kept = tuple(args[n] for n in ("q", "k", "v"))
    q, k = _first(kept[0], shapes), _first(kept[1], shapes)
    mask = tuple(args[n] for n in ("mask", "bias", "sink", "query_ids", "key_ids") if args.get(n) is not None)
    rows = product(q.shape[:-1])
    if dropout_of(args):
        # Probabilities before and after dropout, and its mask (arXiv:2205.05198, section 4.1).
        return Saved(kept, rows * k.shape[-2] * (2 * q.dtype.itemsize + 1))
    return Saved((*kept, *mask, node), rows * max(4, q.dtype.itemsize))


def _first(node: fx.Node, shapes: Shapes) -> Value:
    value = shapes(node)[0]
    assert value is not None, node
    return value


def storage(node: fx.Node) -> fx.Node:
    """The node that owns the memory of ``node``'s value: views and conversions that move nothing are followed."""
    while True:
        if op_name(node) == "getitem":
            source: Any = node.args[0]
            if not is_view(source):
                return node
        elif not (is_view(node) or moves_nothing(node)):
            return node
        node = tensor_args(node)[0] if op_name(node) != "getitem" else source


def moves_nothing(node: fx.Node) -> bool:
    """Whether the result is the input: an identity, or a conversion of a whole value that is where it is wanted."""
    if node.target in IDENTITIES:
        return True
    if node.target is not ops.convert:
        return False
    src, dst = bound(node)["src"], bound(node)["dst"]
    whole = not (isinstance(src, Shard) or isinstance(dst, Shard)) and "P" not in (str(src), str(dst))
    return bool(whole and collectives(src, dst)[0] is None)


def activations(program: Program, shapes: Shapes) -> Number:
    """Bytes of everything that autograd keeps on one rank at the end of the forward."""
    found = list(_kept(program, shapes))
    counts = Counter(node for _, node in {owner for _, _, owners in found for owner in owners})
    return sum(extra for _, extra, _ in found) + sum(n * _first(node, shapes).bytes for node, n in counts.items())


def activations_by_node(program: Program, shapes: Shapes) -> dict[fx.Node, Number]:
    """What each node of the outer graph is the first to keep, calls as wholes, in order; together ``activations``."""
    seen: set[Owner] = set()
    out: dict[fx.Node, Number] = {}
    for at, extra, owners in _kept(program, shapes):
        fresh = {*owners} - seen
        seen |= fresh
        out[at] = extra + sum(_first(node, shapes).bytes for _, node in fresh)
    return out


Owner = tuple[fx.Node | None, fx.Node]  # the call of a block, or None for the outer graph; the node in it


def _kept(program: Program, shapes: Shapes) -> Iterator[tuple[fx.Node, Number, list[Owner]]]:
    """(outer node, extra bytes, values kept) of each op and each call of the outer graph."""
    blocks = {name: [saved(n, shapes) for n in block.graph.nodes] for name, block in program.blocks.items()}
    for at in program.graph.nodes:
        call = at if at.op == "call_module" else None
        kept = blocks[str(at.target)] if call else [saved(at, shapes)]
        values = (value for s in kept for value in s.values)
        yield at, sum(s.extra for s in kept), list(filter(None, (owner_of(program, call, value) for value in values)))


def owner_of(program: Program, call: fx.Node | None, value: fx.Node) -> Owner | None:
    """Where a value's memory lives: (block instance, node), or None for a parameter or an input of the model."""
    node = storage(value)
    while True:
        source: Any = node.args[0] if op_name(node) == "getitem" else None
        if node.op == "placeholder":
            if call is None or "param" in node.meta:
                return None
            passed = dict(program.given(call))[node]
            call, node = None, storage(passed)
        elif isinstance(source, fx.Node) and source.op == "call_module":
            outputs: Any = program.blocks[str(source.target)].graph.output_node().args[0]
            call, node = source, storage(outputs[node.args[1]])
        else:
            return call, node
