"""Programs as text, for people and for golden tests: no ids, no times, no absolute paths.

attn     %1  = all_gather(%0, dim=1, tp)      bf16[B, T, D]        64 MiB
  q      %2  = linear(%1, $q)                 bf16[B, T, D@tp]     0.27 TFLOP
"""

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.errors import AutoparError
from autopar.ir import stage_text
from autopar.ir.describe import Describer, dtype_name
from autopar.ir.engine_text import held, rows, title
from autopar.ir.export import to_dot, to_json, to_python
from autopar.ir.layout import Layout
from autopar.ir.names import fold
from autopar.ir.program import Program, Spec, specs

FORMATS = ("text", "python", "json", "dot")
Line = tuple[str, str, str, str, str]  # module, name, call, type, cost


def print_program(program: Program, *, format: str = "text", rank: int | None = None, block: str | None = None) -> str:
    """The program as ``text``, ``python``, ``json`` or ``dot``.

    Args:
        program: in any Form.
        format: one of ``FORMATS``.
        rank: whose sizes types show and costs count; global sizes and rank 0's costs where None.
        block: print this block's graph alone (the text format's header is left out).

    Raises AutoparError ``unknown-format``, ``unknown-block``, ``unknown-rank``.
    """
    _check(program, format, rank, block)
    at = program.at or program.mesh.coordinates(rank or 0)
    chosen = {name: graph for name, graph in program.graphs() if block in (None, name)}
    plain = Describer(program, at, rank is not None)
    if format == "python":
        return to_python(chosen)
    if format == "json":
        return to_json(program, chosen, plain)
    if format == "dot":
        return to_dot(chosen, plain)
    parts = [] if block is not None else [_header(program), _parameters(program), _stages(program), _engine(program)]
    parts += [_graph(program, name, graph, _numbered(graph, plain)) for name, graph in chosen.items()]
    return "\n\n".join(p for p in parts if p) + "\n"


def _check(program: Program, format: str, rank: int | None, block: str | None) -> None:
    if format not in FORMATS:
        raise AutoparError("unknown-format", f"format {format!r}", f"one of {', '.join(FORMATS)}")
    if block is not None and block not in dict(program.graphs()):
        raise AutoparError("unknown-block", f"no block {block!r}", f"one of {', '.join(program.blocks)}")
    if rank is not None and not 0 <= rank < program.mesh.world:
        raise AutoparError("unknown-rank", f"rank {rank} of {program.mesh.world}", "ranks count from 0")


def _numbered(graph: fx.Graph, plain: Describer) -> Describer:
    """``plain`` with the printed names: $parameter, axis, %number, %number.item; a folded run of calls has one."""
    names: dict[fx.Node, str] = {}
    run_of = {call: run[0] for run in _runs(graph) for call in run}
    count = 0
    for node in graph.nodes:
        if node.op == "placeholder" and ("param" in node.meta or "handle" in node.meta):
            names[node] = f"${node.meta['param']}" if "param" in node.meta else node.meta["handle"]
        elif node.target is operator.getitem:
            source, index = node.args
            names[node] = names[source] + (f".{index}" if len(specs(source)) > 1 else "")
        elif run_of.get(node, node) is not node:
            names[node] = names[run_of[node]]
        elif node.op != "output":
            names[node] = f"%{count}"
            count += 1
    return replace(plain, names=names)


def _values(call: fx.Node) -> list[fx.Node]:
    """What a call of a block takes besides parameters and handles."""
    hidden = ("param", "handle")
    return [a for a in call.args if isinstance(a, fx.Node) and not any(k in a.meta for k in hidden)]


def _follows(call: fx.Node, last: fx.Node) -> bool:
    """Whether ``call`` is the next layer after ``last``: same block, fed by it alone, other values the same."""
    if call.target != last.target or len(_values(call)) != len(_values(last)):
        return False
    items = [u for u in last.users if u.target is operator.getitem]
    readers = {r for item in items for r in item.users}
    differ = [a for a, b in zip(_values(call), _values(last)) if a is not b]
    return readers == {call} and len(items) == len(last.users) and all(d in items for d in differ)


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """The calls of blocks, grouped in runs of equal layers one after another."""
    runs: list[list[fx.Node]] = []
    for call in (n for n in graph.nodes if n.op == "call_module"):
        if runs and _follows(call, runs[-1][-1]):
            runs[-1].append(call)
        else:
            runs.append([call])
    return runs


def _types(layout: Layout | None) -> str:
    return " ".join(f"{a}={t}" for a, t in layout.types) if layout else ""


def _header(program: Program) -> str:
    mesh = program.mesh
    at = f" at {', '.join(f'{a}={c}' for a, c in program.at.items())}" if program.at else ""
    sizes = f" as {','.join(f'{a}={n}' for a, n in mesh.axes)}" if mesh.axes != mesh.user_axes else ""
    lines = [f"program {program.form.name} on mesh {mesh}{sizes} ({mesh.world} ranks){at}"]
    again = {n: f", recomputes {b.recompute}" if b.recompute != "none" else "" for n, b in program.blocks.items()}
    rows = [("block", name, f"× {len(program.calls_of(name))}{again[name]}") for name in program.blocks]
    rows += [("input", i.name, _input(i.spec, i.batch_dim)) for i in program.inputs]
    rows += [("note", "", note) for note in program.notes]
    width = max((len(n) for _, n, _ in rows), default=0)
    lines += [f"  {kind:<5}  {name:<{width}}  {text}".rstrip() for kind, name, text in rows]
    return "\n".join(lines)


def _input(spec: Spec, batch_dim: int | None) -> str:
    where = "no batch dim" if batch_dim is None else f"batch dim {batch_dim}"
    return f"{dtype_name(spec.dtype)}{list(spec.shape)}, {where}"


def _parameters(program: Program) -> str:
    facts = [
        (p.name, (f"{dtype_name(p.spec.dtype)}{list(p.spec.shape)}", _types(p.layout), _remarks(p)))
        for p in program.params.values()
    ]
    if not facts:
        return ""
    return "parameters\n" + "\n".join(_table([(name, *fact) for name, fact in fold(facts)], indent="  "))


def _stages(program: Program) -> str:
    if program.stages is None:
        return ""
    return "\n".join([stage_text.title(program.stages), *_table(stage_text.rows(program), indent="  ")])


def _engine(program: Program) -> str:
    if program.engine is None:
        return ""
    return "\n".join([title(program.engine), *_table(rows(program.engine), indent="  ")])


def _remarks(param: Any) -> str:
    kind = [] if param.kind == "parameter" else [param.kind]
    frozen = ["frozen"] if param.kind == "parameter" and not param.trainable else []
    return ", ".join(kind + frozen + held(param) + ([f"tied to {', '.join(param.tied)}"] if param.tied else []))


def _table(rows: list[tuple[str, ...]], indent: str = "") -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [(indent + "  ".join(c.ljust(w) for c, w in zip(row, widths))).rstrip() for row in rows]


def _graph(program: Program, name: str, graph: fx.Graph, out: Describer) -> str:
    taken = [n for n in graph.nodes if n.op == "placeholder" and not {"param", "handle"} & n.meta.keys()]
    inputs = ", ".join(f"{out.names[n]}: {out.type(n)}" for n in taken)
    title = f"block {name}" if name else "graph"
    rows: list[tuple[str, ...]] = list(_lines(program, name, graph, out))
    (result,) = (n for n in graph.nodes if n.op == "output")
    return "\n".join([f"{title} ({inputs})", *_table(rows, "  ")] + [f"  return {_result(program, name, result, out)}"])


def _result(program: Program, name: str, node: fx.Node, out: Describer) -> str:
    values = node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],)
    if name or len(values) != len(program.outputs):
        return ", ".join(out.value(v) for v in values)
    names = (o.kind if o.name in ("", o.kind) else f"{o.kind} {o.name}" for o in program.outputs)
    return ", ".join(f"{name}: {out.value(v)}" for name, v in zip(names, values))


def _lines(program: Program, name: str, graph: fx.Graph, out: Describer) -> Iterator[Line]:
    paths = [name, *(c.meta.get("path", "") for c in program.calls_of(name)), name.rpartition(".")[0]] if name else []
    first = {run[0]: run for run in _runs(graph)}
    later = {call for run in first.values() for call in run[1:]}
    last = ""
    named = (n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem)
    width = max((len(out.names[n]) for n in named), default=0)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is operator.getitem or node in later:
            continue
        where = _calls_path(first[node]) if node in first else _relative(node.meta.get("module", ""), paths)
        call = (
            _block_call(node, first[node], out) if node in first else f"{out.names[node]:<{width}} = {out.call(node)}"
        )
        yield (where if where != last else "", call, out.type(node), out.cost(node), "")
        last = where


def _relative(module: str, paths: list[str]) -> str:
    for path in paths:
        if path and (module == path or module.startswith(path + ".")):
            return module[len(path) + 1 :]
    return module


def _calls_path(run: list[fx.Node]) -> str:
    paths = [(call.meta.get("path", str(call.target)), None) for call in run]
    return ", ".join(name for name, _ in fold(paths))


def _block_call(call: fx.Node, run: list[fx.Node], out: Describer) -> str:
    times = f" × {len(run)}" if len(run) > 1 else ""
    return f"{out.names[call]} = {call.target}({', '.join(out.value(v) for v in _values(call))}){times}"
