"""All ranks issue the same collectives in the same order."""

from collections.abc import Iterable, Iterator

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.program import Program


def check_order(programs: Iterable[Program]) -> None:
    """Compare the LOCAL programs of several ranks. Raises AutoparError ``collective-order`` at the first difference."""
    programs = list(programs)
    first = list(collectives(programs[0])) if programs else []
    for program in programs[1:]:
        other = list(collectives(program))
        for at, (a, b) in enumerate(zip(first, other)):
            if a != b:
                raise _differ(programs[0], program, f"collective {at} is {' '.join(a)} against {' '.join(b)}")
        if len(first) != len(other):
            raise _differ(programs[0], program, f"{len(first)} collectives against {len(other)}")


def _differ(a: Program, b: Program, why: str) -> AutoparError:
    return AutoparError(
        "collective-order", f"ranks {a.at} and {b.at}: {why}", "this is a fault of a pass, please report it"
    )


def collectives(program: Program) -> Iterator[tuple[str, ...]]:
    """(block, op, axis, dtype) of each call that communicates forward or backward, as the program runs."""
    for node in program.graph.nodes:
        if node.op == "call_module":
            yield from _of(program.blocks[str(node.target)].graph, str(node.target))
        else:
            yield from _of_node(node, "")


def _of(graph: fx.Graph, block: str) -> Iterator[tuple[str, ...]]:
    for node in graph.nodes:
        yield from _of_node(node, block)


def _of_node(node: fx.Node, block: str) -> Iterator[tuple[str, ...]]:
    if node.op != "call_function" or not str(getattr(node.target, "__module__", "")).startswith("autopar.runtime"):
        return
    axes = [a.meta["handle"] for a in node.all_input_nodes if a.meta.get("handle") not in (None, "rng")]
    if axes:
        yield block, node.target.__name__, ",".join(axes), str(getattr(node.meta.get("spec"), "dtype", ""))  # type: ignore[union-attr]
