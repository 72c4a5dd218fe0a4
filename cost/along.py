"""What reductions and softmaxes send along a dim that is shared out: all-reduces of what is left of it."""

from torch import fx

from autopar.cost.compute import Shapes, global_values
from autopar.cost.price import BACKWARD, FORWARD
from autopar.cost.symbols import Number, product
from autopar.ir.program import Spec, specs, tensor_args
from autopar.rules.arguments import arguments, normal_dims
from autopar.rules.table import SPREAD, aten

INDEXED = (aten.max.dim, aten.min.dim)
SOFT = (aten.softmax.int, aten.log_softmax.int)
INDEX = 8  # bytes of an index, and of an integer on the wire


def dims_along(node: fx.Node) -> tuple[int, ...]:
    """The dims of its input that a reduction or a softmax runs along."""
    return normal_dims(arguments(node).get("dim"), len(tensor_args(node)[0].meta["spec"].shape))


def messages(node: fx.Node, shapes: Shapes = global_values) -> list[tuple[str, Number]]:
    """(part of the step, bytes) of each all-reduce of an op of ``SPREAD``, forward and, where one flows, of gradients.

    Maxima, then sums of exponentials, counts of equal elements, or indices; a softmax's gradient takes a sum.
    """
    if node.target not in SPREAD:
        return []
    x, spec = shapes(tensor_args(node)[0])[0], specs(tensor_args(node)[0])[0]
    assert x is not None and isinstance(spec, Spec)
    dims = dims_along(node)
    rows = product(n for d, n in enumerate(x.shape) if d not in dims)
    width = max(4, spec.dtype.itemsize) if spec.is_float else INDEX
    second = INDEX if node.target in INDEXED else width if spec.is_float else 0
    back = width if node.target in SOFT and node.meta.get("diff") else 0
    every = ((FORWARD, width), (FORWARD, second), (BACKWARD, back))
    return [(when, rows * n) for when, n in every if n]
