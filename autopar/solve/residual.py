"""The residual stream: what equal layers hand to each other, and what is added to it."""

from torch import Tag, fx

from autopar.ir import ops
from autopar.rules.table import aten
from autopar.solve.flow import Flow, block_outputs

ALONG = frozenset({aten.layer_norm.default, aten.rms_norm.default, ops.dropout, aten._to_copy.default})


def residual_stream(flow: Flow) -> set[int]:
    """Values of the residual streams: arguments that a block also returns, and what is pointwise with them.

    With tensor parallelism alone the stream stays whole: its features are sharded only inside the products of a layer.
    """
    found: set[int] = set()
    for name, block in flow.program.blocks.items():
        calls = flow.program.calls_of(name)
        returned = {flow.of(n) for n in block_outputs(block.graph)}
        carried = {g.value for g in flow.groups if g.value in returned and g.arguments}
        if len(calls) < 2 or not carried:
            continue
        for passed in zip(*map(flow.program.given, calls)):
            head, feeds = passed[0][0], {flow.of(a) for _, a in passed}
            if feeds & carried and flow.values[flow.of(head)].diff:
                found.add(flow.of(head))
    for node, _ in flow.ops:  # in the order of each graph
        outs = [v for v in flow.outputs(node) if v is not None]
        if (
            _pointwise(node)
            and len(outs) == 1
            and any(
                v in found and flow.values[v].spec.shape == flow.values[outs[0]].spec.shape for v in flow.inputs(node)
            )
        ):
            found.add(outs[0])
    return found


def _pointwise(node: fx.Node) -> bool:
    return node.target in ALONG or Tag.pointwise in getattr(node.target, "tags", ())
