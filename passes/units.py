"""The layers of a program that a pipeline may be cut between, in the order in which they run."""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from autopar.cost.balance import Unit
from autopar.cost.hardware import Hardware
from autopar.cost.shares import local_value, mesh_sizes
from autopar.cost.units import Piece, units
from autopar.ir.layout import Layout
from autopar.ir.program import Program, specs
from autopar.ir.stages import CONSTANT, LIGHT, STAGED, kinds, stage_of

Grain = Callable[[str, set[str]], object]  # of a node's module and what it reads: equal ones in a row are a layer


@dataclass
class Layer:
    """A layer: nodes of the outer graph that stay together, and the parameters that they read."""

    name: str
    nodes: list[fx.Node] = field(default_factory=list)
    params: set[str] = field(default_factory=set)


def layers_of(program: Program, count: int) -> list[Layer]:
    """The layers: each call of a block, and what lies between by modules. Each reads parameters, but where none do.

    Modules are taken as coarsely as gives ``count`` layers: by their place in the first list, in the last, or alone;
    then what reads the same parameters (a model that has none but its own), and what reads buffers too.
    """
    found: list[Layer] = []
    for grain, kept in _GRAINS:
        found = _merged(list(_runs(program, grain, kept)))
        if len(found) >= count:
            break
    return _numbered(found)


def _runs(program: Program, grain: Grain, kept: tuple[str, ...]) -> Iterator[Layer]:
    kind = kinds(program)
    unit, key = Layer(""), object()
    for node in program.graph.nodes:
        if kind.get(node) != STAGED:
            continue
        if node.target is operator.getitem:
            unit.nodes.append(node)
            continue
        call = node.op == "call_module"
        path, read = str(node.meta.get("path" if call else "module", "")), set(_read(program, node, kind, kept))
        mine: object = node if call else grain(path, read)
        if mine != key:
            if unit.nodes:
                yield unit
            unit, key = Layer(path if call or not isinstance(mine, str) else mine), mine
        unit.nodes.append(node)
        unit.params.update(read)
    if unit.nodes:
        yield unit


def _read(program: Program, node: fx.Node, kind: dict[fx.Node, str], kept: tuple[str, ...]) -> Iterator[str]:
    """The parameters (and buffers, if ``kept``) that a node reads, also through values that depend on them alone."""
    own = (name for _, name in program.own(node)) if node.op == "call_module" else ()
    yield from (name for name in own if program.params[name].kind in kept)
    todo = [n for n in node.all_input_nodes if kind[n] in (LIGHT, CONSTANT)]
    while todo:
        source = todo.pop()
        if "param" in source.meta and program.params[name := str(source.meta["param"])].kind in kept:
            yield name
        todo += [n for n in source.all_input_nodes if kind[n] in (LIGHT, CONSTANT)]


def _merged(units: list[Layer]) -> list[Layer]:
    """What reads no parameter belongs to the layer before; at the beginning, to the one behind."""
    out: list[Layer] = []
    for unit in units:
        if out and (not unit.params or not out[-1].params):
            into = out[-1]
            into.name = into.name if into.params else unit.name
            into.nodes += unit.nodes
            into.params |= unit.params
        else:
            out.append(unit)
    return out


def _numbered(units: list[Layer]) -> list[Layer]:
    """Names told apart: the second of the same name gets ``@1``; what no module names, its first parameter's."""
    seen: dict[str, int] = {}
    for unit in units:
        name = unit.name or min(unit.params, default="model")
        seen[name] = seen.get(name, -1) + 1
        unit.name = f"{name}@{seen[name]}" if seen[name] else name
    return units


def _first_number(path: str, read: set[str]) -> str:
    parts = path.split(".")
    at = next((i for i, p in enumerate(parts) if p.isdigit()), len(parts))
    return ".".join(parts[: at + 1])


def _last_number(path: str, read: set[str]) -> str:
    parts = path.split(".")
    at = max((i for i, p in enumerate(parts) if p.isdigit()), default=len(parts))
    return ".".join(parts[: at + 1])


def _module(path: str, read: set[str]) -> str:
    return path


def _reads(path: str, read: set[str]) -> tuple[str, frozenset[str]]:
    return path, frozenset(read)


PARAMETERS, BUFFERS = ("parameter",), ("parameter", "buffer")
_GRAINS: tuple[tuple[Grain, tuple[str, ...]], ...] = (
    (_first_number, PARAMETERS), (_last_number, PARAMETERS), (_module, PARAMETERS), (_reads, PARAMETERS),
    (_reads, BUFFERS),
)  # fmt: skip


def place_early(program: Program) -> None:
    """Move what reads no parameter to the earliest stage that has its inputs, if it makes no more than it takes.

    Inputs count that would not cross without it.
    """
    kind, stage = kinds(program), stage_of(program)
    for node in program.graph.nodes:
        if (
            kind.get(node) != STAGED
            or node.op != "call_function"
            or any(kind[n] == LIGHT for n in node.all_input_nodes)
        ):
            continue
        before = max(stage[n] for n in node.all_input_nodes if kind[n] == STAGED)
        if before >= stage[node]:
            continue
        saved = sum(
            _bytes(n)
            for n in node.all_input_nodes
            if kind[n] == STAGED and all(u is node or stage.get(u, before + 1) <= before for u in n.users)
        )
        if _bytes(node) <= saved:
            moved = [node, *(u for u in node.users if u.target is operator.getitem)]
            for n in moved:
                n.meta["stage"] = stage[n] = before


def _bytes(node: fx.Node) -> int:
    return sum(s.bytes for s in specs(node) if s is not None)


def priced(program: Program, layers: list[Layer], hardware: Hardware) -> list[Unit]:
    """What each layer takes and holds, with what is made of parameters alone where it is read."""
    kind = kinds(program)
    made = [dict.fromkeys(_made(layer.nodes, kind)) for layer in layers]
    return list(units(program, hardware, [Piece(y.name, (*more, *y.nodes)) for y, more in zip(layers, made)]))


def _made(nodes: Iterable[fx.Node], kind: dict[fx.Node, str]) -> Iterator[fx.Node]:
    """What stands behind the nodes and reads parameters alone."""
    for source in (n for node in nodes for n in node.all_input_nodes):
        if kind[source] == LIGHT and source.op == "call_function":
            yield from _made([source], kind)
            yield source


def held_bytes(program: Program, names: Iterable[str]) -> float:
    """Bytes of the named parameters on one rank of their stage."""
    params = (program.params[name] for name in names)
    return float(sum(local_value(p.spec, p.layout or Layout(), mesh_sizes(program.mesh)).bytes for p in params))
