"""Python functions from the graphs of a LOCAL program: one for each kind of block, and the outer one calling them."""

import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import getitem
from typing import Any, cast

from torch import fx

from autopar.emit.chains import chains_of
from autopar.emit.overlap import overlapped
from autopar.ir.program import Program, copy_node

_numbers = count()


@dataclass(frozen=True, slots=True)
class Argument:
    """What a function takes at one place: a ``value`` (passed), a ``param`` or a ``handle``, by name."""

    kind: str
    name: str


@dataclass
class Site:
    """A call of a block in the outer graph: its path, and what it takes beyond what the outer function passes.

    ``arguments`` follow the block's placeholders; those of kind "value" are passed by the outer function in order.
    """

    path: str
    block: str
    arguments: tuple[Argument, ...]


@dataclass
class Outer:
    """The outer graph with calls reduced to ``sites``: ``call_module`` of ``call0``, ``call1``, ... on values only.

    ``loops``: of ``loop0``, ``loop1``, ..., which stand for several sites: (which, what one hands to the next).
    """

    graph: fx.Graph
    arguments: tuple[Argument, ...]
    sites: list[Site]
    loops: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]


def code_of(graph: fx.Graph, name: str) -> tuple[str, dict[str, Any]]:
    """Text of a function ``name(self, ...)`` that frees each value after its last use; its globals."""
    graph = overlapped(graph)
    for node in graph.find_nodes(op="placeholder"):
        node.target = node.name  # a parameter's own name may be no identifier
    code = graph.python_code(root_module="self")
    text = code.src.replace("def forward(self", f"def {name}(self", 1)
    return text.lstrip("\n"), dict(code.globals)


def function_of(graph: fx.Graph, name: str, calls: Any = None) -> Callable[..., Any]:
    """The graph as a function of its placeholders. ``calls`` has an attribute for each ``call_module`` target."""
    text, scope = code_of(graph, name)
    if calls is None:
        text = text.replace(f"def {name}(self, ", f"def {name}(", 1).replace(f"def {name}(self)", f"def {name}()", 1)
    file = f"<autopar {name} {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function if calls is None else function.__get__(calls)


def outer_of(program: Program, owned: Callable[[str, str], bool], loops: bool = False) -> Outer:
    """The outer graph for emission.

    Args:
        owned: whether the unit at a path (first) holds a parameter (second), and so looks it up itself.
        loops: whether equal layers one after the other become one node.
    """
    sites: list[Site] = []
    passed: dict[fx.Node, list[fx.Node | Argument]] = {}
    takes = {name: list(placeholders(block.graph)) for name, block in program.blocks.items()}
    for call in program.calls():
        site, values = _site(call, takes[str(call.target)], owned)
        sites.append(site)
        passed[call] = values
    used = _used(program.graph, passed)
    heads: dict[Argument, fx.Node | None] = {
        argument_of(n): n for n in program.graph.nodes if n.op == "placeholder" and (n in used or "input" in n.meta)
    }
    for argument in (v for values in passed.values() for v in values if isinstance(v, Argument)):
        heads.setdefault(argument, None)  # of a call's own that no unit holds
    taken = sorted(heads, key=lambda a: ("value", "param", "handle").index(a.kind))
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    place: dict[Argument, fx.Node] = {}
    for argument in taken:
        node = heads[argument]
        if node is None:
            place[argument] = graph.placeholder(identifier(argument.name))
        else:
            place[argument] = env[node] = copy_node(graph, node, {})
    number = {call: i for i, call in enumerate(passed)}
    chains = list(chains_of(program.graph, passed)) if loops else []
    names = {call: (f"call{i}", call) for call, i in number.items()}  # and whose values it takes
    names |= {chain.calls[-1]: (f"loop{i}", chain.calls[0]) for i, chain in enumerate(chains)}
    inside = {n for chain in chains for call in chain.calls[:-1] for n in (call, *call.users)}
    for node in program.graph.nodes:
        if node in inside:
            continue
        if node in names:
            name, source = names[node]
            args = tuple(place[v] if isinstance(v, Argument) else env[v] for v in passed[source])
            env[node] = graph.create_node("call_module", name, args, name=node.name)
        elif node.op != "placeholder":
            env[node] = copy_node(graph, node, env)
    return Outer(
        graph, tuple(taken), sites, [(tuple(number[c] for c in chain.calls), chain.carried) for chain in chains]
    )


def identifier(name: str) -> str:
    """A dotted name as one of Python's."""
    return re.sub(r"\W", "_", name)


def argument_of(placeholder: fx.Node) -> Argument:
    """What a placeholder stands for."""
    for kind in ("param", "handle"):
        if kind in placeholder.meta:
            return Argument(kind, str(placeholder.meta[kind]))
    return Argument("value", placeholder.name)


def placeholders(graph: fx.Graph) -> Iterator[fx.Node]:
    """The graph's placeholders in order."""
    return iter(graph.find_nodes(op="placeholder"))


def _site(
    call: fx.Node, takes: list[fx.Node], owned: Callable[[str, str], bool]
) -> tuple[Site, list[fx.Node | Argument]]:
    """The site, and what the outer function passes: values, and parameters that the unit does not hold.

    Args:
        takes: the placeholders of its block.
    """
    path, given = str(call.meta.get("path", "")), iter(call.args)
    arguments: list[Argument] = []
    values: list[fx.Node | Argument] = []
    for head in takes:
        value: fx.Node | Argument
        if "param" in head.meta:
            argument = value = Argument("param", f"{path}.{head.meta['param']}")
        else:
            value = passed = cast(fx.Node, next(given))
            argument = argument_of(passed) if passed.op == "placeholder" else Argument("value", head.name)
        if argument.kind == "value" or (argument.kind == "param" and not owned(path, argument.name)):
            values.append(value)
            argument = Argument("value", head.name)
        arguments.append(argument)
    return Site(path, str(call.target), tuple(arguments)), values


def _used(graph: fx.Graph, passed: Mapping[fx.Node, Sequence[fx.Node | Argument]]) -> set[fx.Node | Argument]:
    used: set[fx.Node | Argument] = set()
    for node in graph.nodes:
        used.update(passed.get(node, node.all_input_nodes))
    return used


def split_runs(graph: fx.Graph) -> tuple[fx.Graph, dict[str, fx.Graph]]:
    """The graph with each run of nodes between calls as a call of its own, ``run0``, ``run1``; and their graphs."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_module":
            runs.append([])
        elif node.op not in ("placeholder", "output"):
            runs[-1].append(node)
    where = {n: i for i, run in enumerate(runs) for n in run}
    out = fx.Graph()
    parts: dict[str, fx.Graph] = {}
    env: dict[fx.Node, fx.Node] = {}
    i = 0

    def emit(index: int) -> None:
        run = runs[index]
        if all(n.target is getitem for n in run):
            env.update((n, out.node_copy(n, lambda x: env[x])) for n in run)
            return
        part, takes, gives = _run_graph(run, {n for n in run if any(where.get(u) != index for u in n.users)})
        parts[f"run{index}"] = part
        result = out.create_node("call_module", f"run{index}", tuple(env[n] for n in takes))
        for k, n in enumerate(gives):
            env[n] = out.call_function(getitem, (result, k))

    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = out.node_copy(node, lambda n: env[n])
        elif node.op == "call_module":
            emit(i)
            i += 1
            env[node] = out.node_copy(node, lambda n: env[n])
        elif node.op == "output":
            emit(i)
            out.node_copy(node, lambda n: env[n])
    return out, parts


def _run_graph(run: list[fx.Node], gives: set[fx.Node]) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    inside = set(run)
    takes = list(dict.fromkeys(a for n in run for a in n.all_input_nodes if a not in inside))
    graph = fx.Graph()
    env = {n: graph.placeholder(n.name) for n in takes}
    for n in run:
        env[n] = graph.node_copy(n, lambda x: env[x])
    ordered = [n for n in run if n in gives]
    graph.output(tuple(env[n] for n in ordered))
    return graph, takes, ordered
