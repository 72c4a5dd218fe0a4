"""Ops without a rule: said once, or refused."""

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.layout import Shard
from autopar.rules.relation import Opaque
from autopar.solve.candidates import Candidates
from autopar.solve.flow import Flow
from autopar.solve.problem import Solution


def report_opaque(flow: Flow, found: Candidates, solution: Solution, axis: str, *, strict: bool) -> list[str]:
    """A message for each op without a rule whose sharded inputs are gathered: op, module, line, dim and bytes.

    Raises AutoparError ``no-rule`` for the first of them where ``strict``.
    """
    messages = []
    for node, _ in flow.ops:
        if not isinstance(found.relations[node], Opaque):
            continue
        kinds = [(v, solution.types[v]) for v in flow.inputs(node)]
        gathered = [(v, t) for v, t in kinds if isinstance(t, Shard)]
        if not gathered:
            continue
        size = sum(flow.values[v].spec.bytes for v, _ in gathered)
        dims = ", ".join(f"dim {t.dim} of {list(flow.values[v].spec.shape)}" for v, t in gathered)
        what = f"{_place(node)}: {node.target} has no sharding rule; its input is sharded over {axis} ({dims})"
        if strict:
            raise AutoparError(
                "no-rule", what, "leave strict off to compute it whole, or write it with ops that have a rule"
            )
        messages.append(f"{what}. It is gathered ({size} bytes) and computed whole on every rank.")
    return messages


def _place(node: fx.Node) -> str:
    module, source = node.meta.get("module") or "the model", node.meta.get("source")
    return f"module '{module}'" + (f" ({source})" if source else "")
