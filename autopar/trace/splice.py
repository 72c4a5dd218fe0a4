"""Puts the graph of a kind of layer in the place of the nodes that stand for its calls."""

from typing import Any

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.program import copy_node
from autopar.trace.builder import Builder
from autopar.trace.export import Exported
from autopar.trace.fold import KEY_AT
from autopar.trace.once import layer

LAYER = layer._opoverload


class Layers:
    """The normalized bodies of an exported graph's layers, each made when first needed."""

    def __init__(self, build: Builder, exported: Exported) -> None:
        self.build = build
        self.exported = exported
        self.normal: dict[int, fx.Graph] = {}
        self.first = {n: p.name for p in exported.params.values() for n in (p.name, *p.tied)}

    def splice(self, node: fx.Node, env: dict[fx.Node, Any]) -> list[fx.Node]:
        """The body's nodes for one call; its results."""
        args: Any = node.args
        inputs, _, path = args
        body = self.exported.bodies[str(path)]
        graph = self._normal(body)
        inner: dict[fx.Node, fx.Node] = {}
        for old in graph.nodes:
            if old.op == "placeholder":
                inner[old] = env[inputs[old.meta["input"]]] if "input" in old.meta else self._param(body, path, old)
            elif old.op == "output":
                return [inner[n] for n in old.args[0]]
            else:
                inner[old] = self._copy(old, inner, node, str(path))
        raise AssertionError("a graph without output")

    def _normal(self, body: Exported) -> fx.Graph:
        from autopar.trace.normalize import normalize

        if id(body) not in self.normal:
            self.normal[id(body)] = normalize(body)
        return self.normal[id(body)]

    def _param(self, body: Exported, path: Any, old: fx.Node) -> fx.Node:
        name = old.meta["param"]
        if name in body.constants:
            known = self.build.constant(body.constants[name])
            if known is None:
                what = f"{path}: constant {name} is unlike that of the first layer of its kind"
                raise AutoparError("trace-failed", what, "make it a buffer")
            return known
        return self.build.params[self.first[f"{path}.{name}"]]

    def _copy(self, old: fx.Node, inner: dict[fx.Node, fx.Node], whole: fx.Node, path: str) -> fx.Node:
        new = copy_node(self.build.graph, old, inner)
        for key, prefix in (("call", whole.meta["call"]), ("module", path)):
            new.meta[key] = f"{prefix}.{old.meta[key]}" if old.meta.get(key) else prefix
        new.meta["source"] = old.meta.get("source") or whole.meta["source"]
        at = KEY_AT.get(new.target)  # type: ignore[arg-type]
        if at is not None and new.args[at]:
            new.args = (*new.args[:at], self.build.key(), *new.args[at + 1 :])
        return new
