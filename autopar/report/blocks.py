"""A layer as a picture: its ops from top to bottom, each in the colour of the axes that shard its result."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.cost.compute import is_view
from autopar.errors import AutoparError
from autopar.ir.describe import Describer, op_name, row_of
from autopar.ir.layout import Layout
from autopar.ir.program import Program

AXES = {"pp": "#7b5ea7", "dp": "#3b7dd8", "ep": "#1f9e89", "cp": "#d59b0b", "tp": "#e0533d"}
WHOLE = "#9aa5b1"
WIDTH, HEIGHT, GAP_X, GAP_Y = 236, 40, 18, 22


@dataclass(frozen=True)
class Box:
    """An op: where it stands, what it says, its colours (one for each axis), and whether it is a collective."""

    x: float
    y: float
    title: str
    text: str
    place: str
    colours: tuple[str, ...]
    partial: bool
    sends: bool


@dataclass(frozen=True)
class Picture:
    """Boxes and curves (paths of SVG) within ``width`` × ``height``."""

    name: str
    boxes: tuple[Box, ...]
    curves: tuple[str, ...]
    width: float
    height: float


def pictures(program: Program) -> list[Picture]:
    """One for each kind of layer; of the outer graph where there is none. Views are left out."""
    describer = Describer(program, program.at or program.mesh.coordinates(0))
    graphs = [(name, block.graph) for name, block in program.blocks.items()] or [("model", program.graph)]
    return [_picture(name, graph, describer) for name, graph in graphs]


def _picture(name: str, graph: fx.Graph, describer: Describer) -> Picture:
    shown = [n for n in graph.nodes if n.op == "call_function" and not is_view(n)]
    shown += [n for n in graph.nodes if n.op == "placeholder" and "param" not in n.meta and _floats(n)]
    nx = _networkx()
    links = nx.DiGraph()
    links.add_nodes_from(shown)
    for node in shown:
        links.add_edges_from((source, node) for source in _sources(node, set(shown)))
    rows = list(nx.topological_generations(links))
    widest = max((len(row) for row in rows), default=1)
    width = widest * (WIDTH + GAP_X) + GAP_X
    at: dict[fx.Node, tuple[float, float]] = {}
    for y, row in enumerate(rows):
        known = sorted(row, key=lambda n: (_middle(n, links, at), n.name))
        left = (width - len(row) * (WIDTH + GAP_X) + GAP_X) / 2
        at.update({n: (left + i * (WIDTH + GAP_X), GAP_Y + y * (HEIGHT + GAP_Y)) for i, n in enumerate(known)})
    boxes = tuple(_box(n, at[n], describer) for n in shown)
    curves = tuple(_curve(at[a], at[b]) for a, b in links.edges)
    return Picture(name, boxes, curves, width, GAP_Y + len(rows) * (HEIGHT + GAP_Y))


def _floats(node: fx.Node) -> bool:
    spec = node.meta.get("spec")
    return bool(getattr(spec, "is_float", False))


def _sources(node: fx.Node, shown: set[fx.Node]) -> Iterator[fx.Node]:
    """The shown ops whose results a node reads, through views."""
    for source in node.all_input_nodes:
        if source in shown:
            yield source
        elif source.op == "call_function":
            yield from _sources(source, shown)


def _networkx() -> Any:
    try:
        import networkx
    except ImportError as error:
        raise AutoparError("missing-package", f"pictures need {error.name}", "pip install 'autopar[report]'") from None
    return networkx


def _middle(node: fx.Node, links: Any, at: dict[fx.Node, tuple[float, float]]) -> float:
    above = [at[n][0] for n in links.predecessors(node) if n in at]
    return sum(above) / len(above) if above else 0.0


def _curve(a: tuple[float, float], b: tuple[float, float]) -> str:
    """From the lower edge of one box to the upper edge of another."""
    x, y, u, v = a[0] + WIDTH / 2, a[1] + HEIGHT, b[0] + WIDTH / 2, b[1]
    bend = max(14.0, (v - y) / 2)
    return f"M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {u:.0f},{v - bend:.0f} {u:.0f},{v:.0f}"


def _box(node: fx.Node, at: tuple[float, float], describer: Describer) -> Box:
    row = row_of(node) if node.op == "call_function" else None
    title = row.name if row else op_name(node) or "input"
    layout = node.meta.get("layout")
    layout = layout[0] if isinstance(layout, tuple) else layout
    types = layout.types if isinstance(layout, Layout) else ()
    axes = [axis for axis, _ in layout.shards()] if isinstance(layout, Layout) else []
    colours = tuple(AXES.get(a.rstrip("0123456789"), WHOLE) for a in axes if _several(a, describer)) or (WHOLE,)
    partial = any(str(t) == "P" for _, t in types)
    place = str(node.meta.get("module") or "").rpartition(".")[2]
    cost = describer.cost(node)
    title = f"{title}  {cost}" if cost else title
    return Box(*at, title, describer.type(node), place, colours, partial, bool(row and (row.forward or row.backward)))


def _several(axis: str, describer: Describer) -> bool:
    return describer.program.mesh.size(axis) > 1
