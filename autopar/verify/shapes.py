"""Run a LOCAL program's graphs on meta tensors and compare each shape with the recorded one."""

import operator
from typing import Any

import torch
from torch import fx

from autopar.ir.program import Program, Spec, specs
from autopar.rules.arguments import names
from autopar.verify.structure import fault


def check_shapes(program: Program, after: str = "") -> None:
    """Raises AutoparError ``wrong-shape`` where a node's local shape or dtype is not what was recorded."""
    for name, graph in program.graphs():
        _Shapes(program, graph, name, after).run()


class _Shapes:
    """One graph: values are meta tensors, collectives are replaced by their recorded result."""

    def __init__(self, program: Program, graph: fx.Graph, name: str, after: str) -> None:
        self.program, self.graph, self.name, self.after = program, graph, name, after
        self.env: dict[fx.Node, Any] = {}
        self.made: dict[Spec | None, torch.Tensor | None] = {}  # what placeholders and calls give, by their spec

    def run(self) -> None:
        with torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "output":
                    return
                self.env[node] = self._value(node)

    def _value(self, node: fx.Node) -> Any:
        if "handle" in node.meta:
            return None
        if node.op != "call_function" or _is_runtime(node):
            made = tuple(self._meta(s) for s in specs(node))
            return made if isinstance(node.meta["spec"], tuple) else made[0]
        args: Any = fx.map_arg(node.args, lambda n: self.env[n])
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: self.env[n])
        if node.target is operator.getitem:
            return args[0][args[1]]
        if any(name == "device" for name, _ in names(node.target)):
            kwargs = {**kwargs, "device": torch.device("meta")}
        op: Any = node.target
        try:
            value = op(*args, **kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise fault("wrong-shape", self.graph, node, str(error), self.name, self.after) from error
        for got, want in zip(value if isinstance(value, (tuple, list)) else [value], specs(node)):
            if isinstance(want, Spec) and (tuple(got.shape) != want.shape or got.dtype != want.dtype):
                why = f"makes {got.dtype}{list(got.shape)}, recorded {want.dtype}{list(want.shape)}"
                raise fault("wrong-shape", self.graph, node, why, self.name, self.after)
        return value

    def _meta(self, spec: Spec | None) -> torch.Tensor | None:
        if spec not in self.made:
            self.made[spec] = torch.empty(spec.shape, dtype=spec.dtype, device="meta") if spec else None
        return self.made[spec]


def _is_runtime(node: fx.Node) -> bool:
    return str(getattr(node.target, "__module__", "")).startswith("autopar.runtime")
