"""A program as text in which node names do not matter."""

from typing import Any

from torch import fx

from autopar.ir.program import Program


def text(program: Program) -> str:
    """Every graph of the program, nodes numbered, with what the metadata says; then parameters, inputs and outputs."""
    lines = []
    for name, graph in program.graphs():
        number = {n: i for i, n in enumerate(graph.nodes)}

        lines.append(f"graph {name}")
        for node, i in number.items():
            target = "" if node.op == "placeholder" else node.target
            keys = ("spec", "diff", "module", "call", "source", "param", "input", "path")
            meta = {k: node.meta[k] for k in keys if k in node.meta}
            lines.append(f"  {i} {node.op} {target} {_show(node.args, number)} {_show(node.kwargs, number)} {meta}")
    return "\n".join([*lines, *map(repr, program.params.values()), repr(program.inputs), repr(program.outputs)])


def _show(value: Any, number: dict[fx.Node, int]) -> str:
    return repr(fx.node.map_arg(value, lambda n: _Ref(number[n])))


class _Ref:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"
