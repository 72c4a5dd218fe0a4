"""Pipelines of passes: their text, and the runner that verifies the program after each."""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from autopar.errors import AutoparError
from autopar.ir.program import Form, Program
from autopar.passes.base import Context, Pass
from autopar.passes.context_parallel import ContextParallel
from autopar.passes.data_parallel import DataParallel
from autopar.passes.expert_parallel import ExpertParallel
from autopar.passes.localize import Localize
from autopar.passes.pipeline_parallel import PipelineParallel
from autopar.passes.recompute import Recompute
from autopar.passes.reshard import Reshard
from autopar.passes.tensor_parallel import TensorParallel
from autopar.passes.zero import Zero
from autopar.verify import check_program

ORDER: tuple[type[Pass], ...] = (
    DataParallel, ExpertParallel, TensorParallel, ContextParallel, Reshard, PipelineParallel, Localize, Zero, Recompute,
)  # fmt: skip
PASSES: dict[str, type[Pass]] = {p.name: p for p in ORDER}


@dataclass(frozen=True)
class Record:
    """What one pass did: its text, nodes before and after over all graphs, seconds."""

    text: str
    before: int
    after: int
    seconds: float


def parse(text: str) -> tuple[Pass, ...]:
    """``"data-parallel,tensor-parallel{sequence},reshard,localize"`` to passes; ``str`` of them joined gives it back.

    Raises AutoparError ``bad-pipeline``, pointing into the text.
    """
    passes, at = [], 0
    for match in re.finditer(r"\s*([a-z][a-z0-9-]*)\s*(?:\{([^}]*)\})?\s*(,|$)", text):
        if match.start() != at:
            break
        at = match.end()
        passes.append(_make(text, match))
        if not match[3]:
            break
    if at != len(text) or not passes or match[3]:
        _refuse(text, at, "expected pass-name or pass-name{option=value}")
    return tuple(passes)


def _make(text: str, match: re.Match[str]) -> Pass:
    if match[1] not in PASSES:
        _refuse(text, match.start(1), f"no pass {match[1]!r}; there are {', '.join(PASSES)}")
    kind, options = PASSES[match[1]], {}
    known = {f.name.replace("_", "-"): f for f in fields(kind)}
    for word in (match[2] or "").split():
        name, _, value = word.partition("=")
        if name not in known:
            _refuse(
                text, match.start(2), f"pass {match[1]} has no option {name!r}; it has {', '.join(known) or 'none'}"
            )
        try:
            options[known[name].name] = _value(known[name].type, value)
        except (KeyError, ValueError):
            _refuse(text, match.start(2), f"option {name} of pass {match[1]} cannot be {value!r}")
    return kind(**options)


def _value(kind: Any, text: str) -> Any:
    if kind in (bool, "bool"):
        return {"": True, "true": True, "false": False}[text]
    if kind in (float | None, "float | None"):
        return float(text)
    return int(text) if kind in (int, "int", int | None, "int | None") else text


def _refuse(text: str, at: int, why: str) -> None:
    raise AutoparError("bad-pipeline", f"{why}\n  {text}\n  {' ' * at}^", "see autopar dump --help for the passes")


def unparse(passes: Iterable[Pass]) -> str:
    """Pipeline text."""
    return ",".join(map(str, passes))


def run(
    program: Program,
    passes: Iterable[Pass] | str,
    context: Context | None = None,
    *,
    after: str | None = None,
    on_pass: Callable[[Pass, Program, Record], None] | None = None,
    records: list[Record] | None = None,
    verify: bool = True,
    own: bool = False,
) -> Program:
    """Run the passes on a clone, checking the result of each; stop after the pass named ``after``.

    Args:
        on_pass: is given the program after each pass, which it may keep.
        records: is extended by what each pass did.
        own: nobody else has the program, so that it may be changed in place.

    Raises AutoparError of the pass, ``wrong-form`` where a pass is out of place, or that of a failed check.
    """
    context, mine, checked = context or Context(), own, False
    for p in parse(passes) if isinstance(passes, str) else passes:
        if program.form != p.requires:
            raise AutoparError(
                "wrong-form", f"pass {p.name} needs {p.requires.name}, the program is {program.form.name}",
                f"order the passes as {', '.join(PASSES)}",
            )  # fmt: skip
        start, before = time.perf_counter(), _size(program)
        if not (checked and p.idle(program)):  # else it is as it was checked
            program = p.rewrite(program if mine else program.clone(), context)
            mine = on_pass is None  # a program that nobody else has seen may be changed in place
            assert program.form == p.produces or p.requires == p.produces
            if verify:
                check_program(program, str(p))
                checked = True
        record = Record(str(p), before, _size(program), time.perf_counter() - start)
        if records is not None:
            records.append(record)
        if on_pass:
            on_pass(p, program, record)
        if after == p.name:
            break
    return program


def _size(program: Program) -> int:
    return sum(len(graph.nodes) for _, graph in program.graphs())


__all__ = ["PASSES", "Form", "Record", "parse", "run", "unparse"]
