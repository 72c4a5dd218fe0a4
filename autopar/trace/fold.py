"""Equal layers become one Block that is called with different parameters.

The graph is cut in contiguous runs of nodes, one for each call of an element of a list of modules. Runs of equal
structure (ops, numbers, specs, wiring, relative parameter names) share a block.
"""

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from string import ascii_lowercase
from typing import Any

from torch import fx

from autopar.ir import ops
from autopar.ir.edit import frozen
from autopar.ir.program import Block, Program, Spec
from autopar.trace.gradients import mark_differentiable

KEY_AT = {ops.dropout: 2, ops.draw: 2, ops.attention: 8}  # which argument tells random draws apart


@dataclass
class Run:
    """The nodes of one call of an element. ``path``: "layers.3". ``call``: that, or "layers.3@1" if called again."""

    path: str
    call: str
    nodes: list[fx.Node]
    values: dict[fx.Node, int] = field(default_factory=dict)  # with their places
    params: dict[fx.Node, int] = field(default_factory=dict)
    results: list[int] = field(default_factory=list)
    signature: Any = None

    @property
    def container(self) -> str:
        """The list that the element is of, as a pattern: "layers.*"."""
        return re.sub(r"\d+$", "*", self.path)


def fold(program: Program) -> Program:
    """The program, changed in place, with a block for each kind of layer; what does not fold stays outside."""
    runs = plan(list(program.graph.nodes), 0)
    kinds: dict[tuple[str, Any], list[Run]] = {}
    for run in runs:
        kinds.setdefault((run.container, run.signature), []).append(run)
    names = _names(list(kinds))
    results = {key: sorted({i for r in members for i in r.results}) for key, members in kinds.items()}
    for key, members in kinds.items():
        program.blocks[names[key]] = Block(names[key], _block_graph(members, results[key]))
    moved: dict[fx.Node, fx.Node] = {}
    for run in runs:
        key = (run.container, run.signature)
        _call(program.graph, names[key], run, results[key], moved)
    for block in program.blocks.values():
        mark_differentiable(block.graph, {})
    return program


def _names(keys: list[tuple[str, Any]]) -> dict[tuple[str, Any], str]:
    """The container's pattern, with .a, .b, ... where it has several kinds."""
    out = {}
    for pattern in dict.fromkeys(k for k, _ in keys):
        same = [k for k in keys if k[0] == pattern]
        for i, key in enumerate(same):
            out[key] = pattern if len(same) == 1 else f"{pattern}.{_letters(i)}"
    return out


def _letters(i: int) -> str:
    return (_letters(i // 26 - 1) if i >= 26 else "") + ascii_lowercase[i % 26]


def element(node: fx.Node, depth: int) -> str | None:
    """Call path of the element of the depth-th nested list that the node is in."""
    call = node.meta.get("call") or ""
    ends = [m.end() for m in re.finditer(r"(?:^|\.)\d+(?:@\d+)?(?=\.|$)", call)]
    return call[: ends[depth]] if node.op == "call_function" and len(ends) > depth else None


def plan(nodes: list[fx.Node], depth: int) -> list[Run]:
    """The runs that become calls: of the outermost lists that repeat; of any list where nothing does."""
    runs = [Run(_plain(call), call, list(group)) for call, group in groupby(nodes, lambda n: element(n, depth)) if call]
    out: list[Run] = []
    by_list: dict[str, list[Run]] = {}
    for run in runs:
        by_list.setdefault(run.container, []).append(run)
    for members in by_list.values():
        deeper = [r for m in members for r in plan(m.nodes, depth + 1)]
        usable = [r for r in members if analyse(r)]
        several = len({r.path for r in members}) > 1
        here = repeats(usable) or (several and not repeats(deeper))
        out += usable if usable and here else deeper
    return out


def repeats(runs: list[Run]) -> bool:
    """Whether two of the runs are of one kind."""
    return len({(r.container, r.signature) for r in runs}) < len(runs)


def _plain(call: str) -> str:
    return re.sub(r"@\d+", "", call)


def analyse(run: Run) -> bool:
    """Fill in what the run takes, gives and looks like. False where it has no parameters or no plain results."""
    inside = {n: i for i, n in enumerate(run.nodes)}
    rows = []
    for node in run.nodes:
        key = (_wiring(run, inside, node.args), _wiring(run, inside, node.kwargs))
        rows.append((node.target, key, node.meta["spec"], _plain(node.meta["call"]).removeprefix(run.path)))
    run.results = [i for i, n in enumerate(run.nodes) if any(u not in inside for u in n.users)]
    random = any(n.target in KEY_AT for n in run.nodes)
    ordinal = run.call.rpartition("@")[2] if random and "@" in run.call else ""
    taken = (tuple(v.meta["spec"] for v in run.values), tuple((_own(run, p), p.meta["spec"]) for p in run.params))
    run.signature = (tuple(_keyless(rows, run)), taken, ordinal)
    plain = all(isinstance(n.meta["spec"], Spec) for n in [*run.values, *(run.nodes[i] for i in run.results)])
    return plain and bool(run.params) and bool(run.results)


def _own(run: Run, node: fx.Node) -> str | None:
    """The name, relative to the run's path, of a parameter of the element itself."""
    name = str(node.meta.get("param", ""))
    return name[len(run.path) + 1 :] if node.op == "placeholder" and name.startswith(run.path + ".") else None


def _wiring(run: Run, inside: dict[fx.Node, int], value: Any) -> Any:
    """A hashable form of arguments, in which nodes are places in the run, in its values or in its parameters."""
    if isinstance(value, fx.Node):
        if value in inside:
            return ("node", inside[value])
        if value in run.values:
            return ("value", run.values[value])
        kind, pool = ("value", run.values) if _own(run, value) is None else ("param", run.params)
        return (kind, pool.setdefault(value, len(pool)))
    if isinstance(value, (list, tuple)):
        return tuple(_wiring(run, inside, v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _wiring(run, inside, v)) for k, v in sorted(value.items()))
    return frozen(value)


def _keyless(rows: list[Any], run: Run) -> Iterable[Any]:
    """The rows with random keys counted from the run's own first."""
    keys: dict[Any, int] = {}
    for (target, (args, kwargs), *rest), node in zip(rows, run.nodes):
        at = KEY_AT.get(node.target)  # type: ignore[arg-type]
        if at is not None:
            key = keys.setdefault(node.args[at], len(keys))
            args = (*args[:at], ("key", key), *args[at + 1 :])
        yield (target, args, kwargs, *rest)


def _block_graph(runs: list[Run], results: list[int]) -> fx.Graph:
    first = runs[0]
    head = first.container if len(runs) > 1 else first.path
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    values = [list(r.values) for r in runs]
    for i, value in enumerate(first.values):
        env[value] = graph.placeholder(f"x{i}" if i else "x")
        flows = any(own[i].meta["diff"] for own in values)
        env[value].meta = {"spec": value.meta["spec"], "diff": flows}
    for param in first.params:
        own = _own(first, param)
        assert own is not None
        env[param] = graph.placeholder(re.sub(r"\W", "_", own))
        env[param].meta = {"spec": param.meta["spec"], "diff": param.meta["diff"], "param": own}
    for node in first.nodes:
        new = env[node] = graph.node_copy(node, lambda n: env[n])
        new.meta = dict(node.meta)
        new.meta["module"] = head + _plain(node.meta["call"]).removeprefix(first.path)
        new.meta["call"] = first.container + node.meta["call"].removeprefix(first.call)
    graph.output(tuple(env[first.nodes[i]] for i in results))
    return graph


def _call(graph: fx.Graph, name: str, run: Run, results: list[int], moved: dict[fx.Node, fx.Node]) -> None:
    """Put the call in the run's place. ``moved`` says what stands for nodes of runs that are gone."""
    nodes = [run.nodes[i] for i in results]
    inside = set(run.nodes)
    with graph.inserting_after(run.nodes[-1]):
        call = graph.create_node("call_module", name, tuple(moved.get(v, v) for v in run.values))
    specs = tuple(n.meta["spec"] for n in nodes)
    flows = any(n.meta["diff"] for n in nodes)
    call.meta = {"spec": specs, "diff": flows, "module": run.path, "call": run.call, "path": run.path, "source": ""}
    at = call
    for i, node in enumerate(nodes):
        if all(u in inside for u in node.users):
            continue
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (call, i))
        at.meta = {**node.meta, "call": run.call, "module": run.path}
        node.replace_all_uses_with(at, delete_user_cb=lambda user: user not in inside)
        moved[node] = at
    for node in reversed(run.nodes):
        graph.erase_node(node)
    for param in run.params:
        if not param.users:  # others may read it too: a layer that is called again, a parameter that is used outside
            graph.erase_node(param)
