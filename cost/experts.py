"""What a layer of experts costs one rank, routing balanced: its products, what it keeps, the rows that travel."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from torch import fx

from autopar.cost.compute import NodeCost, Shapes, Value, differentiable, is_view, op_name, words
from autopar.cost.symbols import Number, product, ratio
from autopar.ir import ops
from autopar.ir.program import Spec, tensor_args
from autopar.rules.arguments import arguments
from autopar.rules.experts import exchange_axis, inside

MATMULS = words("linear mm bmm matmul addmm baddbmm")


@dataclass(frozen=True)
class Rows:
    """An ``ops.experts`` node as one rank runs it.

    Args:
        count: rows that its experts compute: one for each token and choice, where routing is balanced.
        share: the part that it holds of each of its experts.
        hidden, out: widths of a row, before and after.
        itemsize: bytes of an element.
        params: its stacked parameters.
    """

    count: Number
    share: Number
    hidden: Number
    out: Number
    itemsize: int
    params: tuple[Value, ...]

    @staticmethod
    def of(node: fx.Node, shapes: Shapes) -> "Rows":
        """From the node and what a rank has of its values."""
        hidden, index, _, *given = (_value(n, shapes) for n in tensor_args(node))
        specs = [n.meta["spec"] for n in tensor_args(node)[3:]]
        largest = max(range(len(specs)), key=lambda i: prod(specs[i].shape))
        local, whole = given[largest], specs[largest].shape
        count = product(index.shape)
        if exchange_axis(node) is None:
            count = ratio(count * local.shape[0], whole[0])
        inner = ratio(product(local.shape[1:]), prod(whole[1:]))
        out = _value(node, shapes).shape[-1]
        return Rows(count, inner, hidden.shape[-1], out, hidden.dtype.itemsize, tuple(given))

    @property
    def flops(self) -> Number:
        """Of the products, forward."""
        return sum(2 * self.count * product(p.shape[1:]) for p in self.params if len(p.shape) > 2)


def _value(node: fx.Node, shapes: Shapes) -> Value:
    value = shapes(node)[0]
    assert value is not None, node
    return value


def _widths(node: fx.Node, fused: bool = False) -> Iterator[int]:
    """Of what one row becomes on its way through an expert, whole.

    ``fused``: only what a product takes, or makes for others.
    """
    known = arguments(node)
    params = tuple(p.meta["spec"] for p in known["params"])
    graph = inside(known["body"], known["hidden"].meta["spec"], params)
    for op in graph.ops:
        spec = op.meta["spec"]
        if isinstance(spec, Spec) and not is_view(op) and not (fused and not _between_products(op)):
            yield prod(spec.shape[1:])


def _between_products(op: fx.Node) -> bool:
    """Whether a product takes the value, or makes it for others; no backward reads the result of all."""
    made = op_name(op) in MATMULS and len(op.users) > 0
    return made or any(op_name(u) in MATMULS or (is_view(u) and _between_products(u)) for u in op.users)


def _traffic(node: fx.Node, fused: bool) -> tuple[int, int]:
    """Elements of a row that an expert's products read and write, and that what stands between them does."""
    known = arguments(node)
    graph = inside(known["body"], known["hidden"].meta["spec"], tuple(p.meta["spec"] for p in known["params"]))
    products = between = 0
    for op in graph.ops:
        spec = op.meta["spec"]
        if not isinstance(spec, Spec) or is_view(op):
            continue
        made, width = op_name(op) in MATMULS, prod(spec.shape[1:])
        touched = _between_products(op)
        products += width * (made + (touched and not made))
        between += width * touched if fused else 2 * width * (not made)
    return products, between


def cost(node: fx.Node, shapes: Shapes, fused: bool = False) -> NodeCost:
    """Grouped products of rows with the parameters of their experts; rows are sorted before and put back after.

    ``fused``: what stands between two products is one kernel, and rows are sorted as Megatron-LM does it: for the ranks
    that they go to, for the experts of a rank, and back again (``moe/token_dispatcher.py``).
    """
    rows = Rows.of(node, shapes)
    both, (products, between) = rows.hidden + rows.out, _traffic(node, fused)
    own = rows.count * rows.itemsize
    moved = own * (both + products * rows.share) + sum(p.bytes for p in rows.params)
    sorting = 2 * own * both
    if fused:
        sorting = 3 * own * both + _value(tensor_args(node)[0], shapes).bytes + _value(node, shapes).bytes
    beside = sorting + own * between * rows.share
    matrices = [p for p in rows.params if len(p.shape) > 2]
    widest = max(matrices, key=lambda p: float(prod(1 if not isinstance(n, int) else n for n in p.shape)))
    dims = (ratio(rows.count, widest.shape[0]), widest.shape[1], widest.shape[2])
    times = 2 if differentiable(node) else 0
    back = (times // 2 if fused else times) * sorting + times * (beside - sorting)
    return NodeCost(rows.flops, moved, times * rows.flops, times * moved, "matmul", dims, (beside, back))


def kept(node: fx.Node, shapes: Shapes, fused: bool = False) -> Number:
    """Bytes that autograd keeps besides the node's inputs: rows as sorted, what they become, and results.

    ``fused``: what stands between two products is one kernel, which also weighs rows, so that results are not kept.
    """
    rows = Rows.of(node, shapes)
    inner = sum(rows.count * ratio(w, 1) * rows.share for w in _widths(node, fused))
    return (inner + rows.count * (rows.hidden + (0 if fused else rows.out))) * rows.itemsize


def rows_bytes(node: fx.Node) -> tuple[int, int]:
    """Bytes of all ranks' rows as they go to their experts, one for each token and choice, and as they come back."""
    hidden, index = (n.meta["spec"] for n in tensor_args(node)[:2])
    count = prod(index.shape) * hidden.dtype.itemsize
    return count * hidden.shape[-1], count * node.meta["spec"].shape[-1]


def workspace(node: fx.Node, shapes: Shapes) -> Number:
    """Bytes that a rank holds for a moment: rows that come back, beside those that it sends, which are kept."""
    if exchange_axis(node) is None:
        return 0
    rows = Rows.of(node, shapes)
    return rows.count * rows.out * rows.itemsize


def dispatches(nodes: Iterable[fx.Node], shapes: Shapes) -> dict[str, Number]:
    """``workspace`` of the largest of some layers, which run one by one, by the axis along which rows travel."""
    found = {}
    for node in sorted((n for n in nodes if n.target is ops.experts), key=rows_bytes):
        if (axis := exchange_axis(node)) is not None:
            found[axis] = workspace(node, shapes)
    return found


def travel(node: fx.Node, shapes: Shapes) -> tuple[str, Number, Number] | None:
    """The axis along which rows travel, and the bytes of a rank's rows there and back; None where none do."""
    axis = exchange_axis(node)
    if axis is None:
        return None
    rows = Rows.of(node, shapes)
    return axis, rows.count * rows.hidden * rows.itemsize, rows.count * rows.out * rows.itemsize
