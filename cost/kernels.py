"""The kernels of a graph: one an op as eager execution runs them, or pointwise chains fused to one kernel each.

Fused: neighbouring ops that are bound by memory, with nothing else between them, are one kernel, which reads what comes
from outside and writes what is used outside. It keeps for its backward what it read, and computes its inside again.
That is what norms, rotary embeddings, gated activations and losses are in training frameworks with their own kernels.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from torch import fx

from autopar.cost import experts
from autopar.cost.closed import Kernel
from autopar.cost.compute import ATTENTIONS, Shapes, differentiable, is_view, node_cost, op_name
from autopar.cost.hardware import dtype_name
from autopar.cost.memory import Saved, moves_nothing, saved, storage
from autopar.cost.program import work_dtype
from autopar.cost.symbols import Number
from autopar.ir import ops
from autopar.ir.program import Spec, specs, tensor_args


def kernels(graph: fx.Graph, shapes: Shapes, fused: bool = False) -> list[tuple[fx.Node, Kernel]]:
    """Every kernel with the last node that it computes, in order."""
    groups = fusion(graph) if fused else {}
    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, head in groups.items():
        members[head].append(node)
    out = []
    for node in graph.nodes:
        inside = members[groups[node]] if node in groups else []
        if len(inside) > 1:
            if node is inside[-1]:
                out.append((node, _fused(inside, shapes)))
            continue
        cost = experts.cost(node, shapes, fused) if node.target is ops.experts else node_cost(node, shapes)
        if cost.kind != "free":
            flops, moved = (cost.flops, cost.backward_flops), (cost.bytes, cost.backward_bytes)
            out.append((node, Kernel(cost.kind, flops, moved, cost.matmul, dtype_name(work_dtype(node)))))
        if cost.beside != (0, 0):
            out.append((node, Kernel("rows", (0, 0), cost.beside, None, dtype_name(work_dtype(node)))))
    return out


def fusion(graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
    """The head of the fused kernel that each pointwise or reducing op belongs to.

    An op joins the one that made its input where nobody outside the two reads that value.
    """
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        below = max((level[n] for n in node.all_input_nodes), default=0)
        level[node] = below + (not (_soft(node) or _transparent(node)))
    head = {n: n for n in graph.nodes if _soft(n)}

    def root(node: fx.Node) -> fx.Node:
        while head[node] is not node:
            node = head[node]
        return node

    for node in list(head):
        readers = list(_readers(node))
        if readers and all(r in head and level[r] == level[node] for r in readers):
            for reader in readers:
                head[root(reader)] = root(node)
    return {n: root(n) for n in head}


def kept(node: fx.Node, shapes: Shapes, groups: Mapping[fx.Node, fx.Node]) -> Saved:
    """What autograd keeps of ``node``, as ``memory.saved``; a fused kernel keeps what it reads, not its inside.

    A product casts again what was widened for it (Megatron-LM ``moe/moe_utils.py``, ``RouterGatingLinearFunction``).
    Attention copies its part of a larger product, which is then let go of (``multi_latent_attention.py``).
    """
    own = saved(node, shapes)
    if node.target is ops.experts and groups and own.extra != 0:
        return Saved(own.values, experts.kept(node, shapes, fused=True))
    if groups and node.target in ATTENTIONS:
        parts = [v for v in own.values if _elements(v) < _elements(storage(v))]
        return Saved(tuple(v for v in own.values if v not in parts), own.extra + sum(_bytes(v, shapes) for v in parts))
    if node not in groups:
        return Saved(tuple(map(_narrow, own.values)), own.extra) if groups else own
    values: list[fx.Node] = []
    logits = tensor_args(node)[:1] if node.target is ops.token_loss else []
    for value in (*own.values, *logits):
        values += _outside(value, groups[node], groups)
    return Saved(tuple(dict.fromkeys(values)))


def _elements(node: fx.Node) -> int:
    return sum(prod(s.shape) for s in specs(node) if isinstance(s, Spec))


def _narrow(value: fx.Node) -> fx.Node:
    """What a value was cast from, where that takes less memory."""
    source = storage(value)
    if op_name(source) not in ("_to_copy", "to"):
        return value
    taken = tensor_args(source)[0]
    wide, narrow = (specs(n)[0] for n in (source, taken))
    return taken if wide is not None and narrow is not None and narrow.dtype.itemsize < wide.dtype.itemsize else value


def _outside(value: fx.Node, head: fx.Node, groups: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The values from outside a fused kernel that ``value`` is computed from; itself where it is read outside."""
    source = storage(value)
    if groups.get(source) is not head or not all(groups.get(r) is head for r in _readers(source)):
        return [value]
    found = [v for n in tensor_args(source) for v in _outside(n, head, groups)]
    return [v for v in found if v.op != "get_attr"]


def _soft(node: fx.Node) -> bool:
    """Whether the op is bound by memory and can be fused with its neighbours."""
    if node.op != "call_function" or _transparent(node) or node.target in (ops.convert, ops.attention):
        return False
    return node_cost(node).kind == "memory" and op_name(node) not in ("embedding", "dropout")


def _transparent(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    return is_view(node) or moves_nothing(node)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads the value, through views."""
    for user in node.users:
        if user.op == "call_function" and _transparent(user):
            yield from _readers(user)
        else:
            yield user


def _fused(inside: list[fx.Node], shapes: Shapes) -> Kernel:
    """Reads what comes from outside, writes what goes outside; backward the same for gradients, and reads again."""
    group = set(inside)
    read = {storage(n): n for node in inside for n in tensor_args(node) if storage(n) not in group}
    made = [n for n in inside if any(r not in group for r in _readers(n)) or not n.users]
    taken: Number = sum(_bytes(n, shapes) for n in read.values())
    written: Number = sum(_bytes(n, shapes) for n in made)
    gradients: Number = sum(_bytes(n, shapes) for n in read.values() if differentiable(n))
    flops: Number = sum(node_cost(n, shapes).flops for n in inside)
    back = any(differentiable(n) for n in made)
    backward = (2 * flops, taken + written + gradients) if back else (0, 0)
    return Kernel(
        "memory", (flops, backward[0]), (taken + written, backward[1]), None, dtype_name(work_dtype(inside[-1]))
    )


def _bytes(node: fx.Node, shapes: Shapes) -> Any:
    return sum(v.bytes for v in shapes(node) if v is not None)
