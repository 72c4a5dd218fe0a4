"""Ops without a rule: said once, or refused."""

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.layout import Shard
from autopar.rules.relation import Opaque
from autopar.solve.candidates import Candidates
from autopar.solve.flow import Flow
from autopar.solve.problem import Solution


def report_opaque(flow: Flow, found: Candidates, solution: Solution, axis: str, *, strict: bool) -> list[str]:
    """A message for each op without a rule on the way of a gradient: op, module, line, dim and bytes.

    Its sharded inputs are gathered; or they are whole for its sake, where they could be sharded.
    Raises AutoparError ``no-rule`` for the first of them where ``strict``.
    """
    messages = []
    for node, _ in flow.ops:
        if not isinstance(found.relations[node], Opaque):
            continue
        kinds = [(v, solution.types[v]) for v in flow.inputs(node)]
        gathered = [(v, t) for v, t in kinds if isinstance(t, Shard)]
        could = [(v, next(iter(found.shards[v]))) for v, _ in kinds if flow.values[v].diff and found.shards.get(v)]
        cut = gathered or could
        if not cut:
            continue
        size = sum(flow.values[v].spec.bytes for v, _ in cut)
        dims = ", ".join(f"dim {t.dim} of {list(flow.values[v].spec.shape)}" for v, t in cut)
        state = "is" if gathered else "could be"
        what = f"{_place(node)}: {node.target} has no sharding rule; its input {state} sharded over {axis} ({dims})"
        if strict:
            raise AutoparError(
                "no-rule", what, "leave strict off to compute it whole, or write it with ops that have a rule"
            )
        made = f"gathered ({size} bytes)" if gathered else f"whole ({size} bytes)"
        messages.append(f"{what}. It is {made} and computed whole on every rank.")
    return messages


def _place(node: fx.Node) -> str:
    module, source = node.meta.get("module") or "the model", node.meta.get("source")
    return f"module '{module}'" + (f" ({source})" if source else "")
