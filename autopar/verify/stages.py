"""Stages compute everything once, from what they hold or receive, and what one sends the next one receives."""

from collections import Counter

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.program import Form, Program
from autopar.ir.stages import Part, kinds, parts_of, stage_of

FIX = "this is a fault of a pass, please report it"


def check_stages(program: Program, after: str = "") -> None:
    """Raises AutoparError ``stage-order``, ``stage-values``, ``stage-params`` or ``stage-outputs``."""
    if program.stages is None:
        return
    where = f", after pass {after}" if after else ""
    _check_order(program, where)
    parts = parts_of(program)
    for part, before in zip(parts, [None, *parts]):
        _check_values(part, before, where)
        _check_params(program, part, where)
    returned = Counter(i for part in parts for i in part.outputs)
    if returned != Counter(range(len(program.outputs))):
        raise AutoparError("stage-outputs", f"stages return the outputs {sorted(returned.elements())}{where}", FIX)
    lost = [i for i, o in enumerate(program.outputs) if o.kind == "loss" and i not in parts[-1].outputs]
    if lost:
        raise AutoparError("stage-outputs", f"the last stage does not return the loss{where}", FIX)


def _check_order(program: Program, where: str) -> None:
    """A stage reads from itself and from those before it; every stage runs on a rank."""
    assert program.stages is not None
    count, kind, stage = len(program.stages.names), kinds(program), stage_of(program)
    for node in stage:
        mark = node.meta.get("stage")
        if mark is not None and not (0 <= mark < count and mark == stage[node]):
            reads = {str(n): stage[n] for n in node.all_input_nodes if n in stage}
            raise AutoparError(
                "stage-order", f"{node.name} is in stage {mark} of {count}, it reads {reads}{where}", FIX
            )
        if mark is None and program.form < Form.LOCAL:
            raise AutoparError("stage-order", f"{node.name} ({kind[node]}) is in no stage{where}", FIX)
    if set(program.stages.ranks) != set(range(program.mesh.size("pp"))) or len(program.stages.ranks) != count:
        raise AutoparError("stage-order", f"{count} stages run on ranks {program.stages.ranks}{where}", FIX)


def _check_values(part: Part, before: Part | None, where: str) -> None:
    """Sends and receives pair, and a stage takes nothing else but inputs, parameters and handles."""
    sent = before.sent if before else ()
    if part.received != sent:
        names = [v.name for v in part.received], [v.name for v in sent]
        raise AutoparError("stage-values", f"stage {part.index} receives {names[0]}, is sent {names[1]}{where}", FIX)
    graph: fx.Graph = part.graph
    graph.lint()
    heads = [n for n in graph.nodes if n.op == "placeholder"]
    unknown = [n.name for n in heads if not {"param", "handle", "input", "received"} & n.meta.keys()]
    if unknown:
        raise AutoparError("stage-values", f"stage {part.index} takes {unknown}, which nobody gives it{where}", FIX)


def _check_params(program: Program, part: Part, where: str) -> None:
    for name in part.params:
        param = program.params[name]
        if param.kind == "parameter" and part.index not in param.stages:
            why = f"stage {part.index} reads {name}, which lives in stages {list(param.stages)}"
            raise AutoparError("stage-params", why + where, FIX)
