"""From what a layer of experts was seen to compute to what one expert computes."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.grouped import Body
from autopar.ir.program import Spec
from autopar.trace.builder import Builder
from autopar.trace.questions import behind
from autopar.trace.record import Unrecognized

aten = torch.ops.aten
Step = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def steps_of(nodes: Iterable[fx.Node], leaves: list[fx.Node], result: fx.Node) -> tuple[Step, ...]:
    """The recorded ops behind a result as steps; value i is ``leaves[i]``. Raises Unrecognized for other inputs."""
    found, made = behind([result]), list[Step]()
    at = {n: i for i, n in enumerate(leaves)}
    for node in nodes:
        if node not in found or node in leaves:
            continue
        if node.op == "placeholder":
            raise Unrecognized("an expert reads more than its rows and its parameters")
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: ("%", at[n]))
        made.append((node.target, _frozen(args), tuple((k, _frozen(v)) for k, v in kwargs.items())))
        at[node] = len(leaves) + len(made) - 1
    if not made:
        raise Unrecognized("an expert that computes nothing")
    return tuple(made)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


def body_of(steps: Iterable[Step], x: Spec, params: Mapping[str, Spec]) -> Body:
    """The body of one expert's steps, in normal form, for rows like ``x`` and stacked parameters like ``params``.

    Raises Unrecognized where a parameter is used in another way than in a product or as a vector added or multiplied.
    """
    build = Builder(fx.Graph())
    values: list[Any] = [build.placeholder("x", x)]
    values += [build.placeholder(n, Spec(s.shape[1:], s.dtype)) for n, s in params.items()]
    whole = len(values)
    for target, args, kwargs in steps:
        given = [_thawed(a, values) for a in args]
        try:
            values.append(build.apply(target, *given, **{k: _thawed(v, values) for k, v in kwargs}))
        except (AutoparError, RuntimeError, ValueError, IndexError, TypeError) as error:
            raise Unrecognized(f"{target} of an expert cannot be said of other rows: {error}") from error
    return _Writer(values[:whole]).write(values[-1])


def _thawed(value: Any, values: list[Any]) -> Any:
    if isinstance(value, tuple):
        return values[value[1]] if len(value) == 2 and value[0] == "%" else [_thawed(v, values) for v in value]
    return value


class _Writer:
    """Writes a normalized graph as the steps of a body."""

    def __init__(self, leaves: list[fx.Node]) -> None:
        self.at = {n: i for i, n in enumerate(leaves)}
        self.params = set(leaves[1:])
        self.count = len(leaves)
        self.steps: list[Any] = []

    def write(self, result: fx.Node) -> Body:
        """The steps as far as ``result``."""
        order = [n for n in result.graph.nodes if n.op == "call_function"]
        used, todo = {result}, [result]
        while todo:
            fresh = [a for a in todo.pop().all_input_nodes if a not in used]
            used.update(fresh)
            todo += fresh
        for node in order:
            if node in used and not self._only_turns(node):
                self.at[node] = self._step(node)
        return tuple(self.steps)

    def _only_turns(self, node: fx.Node) -> bool:
        """A matrix of an expert the other way round, which the product that reads it takes as it is."""
        turned = node.target is aten.permute.default and node.args[1] == [1, 0] and node.args[0] in self.params
        if not turned and not any(n in self.at and n not in self.params for n in node.all_input_nodes):
            raise Unrecognized("a parameter of an expert is computed with before it meets a row")
        return turned

    def _add(self, name: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...] = ()) -> int:
        self.steps.append((name, args, kwargs))
        return self.count + len(self.steps) - 1

    def _step(self, node: fx.Node) -> int:
        args: Any = node.args
        if node.target is aten.linear.default:
            return self._product(args[0], args[1], args[2] if len(args) > 2 else None, flipped=True)
        if node.target is aten.mm.default:
            return self._product(args[0], args[1], None, flipped=False)
        if node.target is aten.addmm.default and not node.kwargs:
            return self._product(args[1], args[2], args[0], flipped=False)
        if node.target is aten.native_layer_norm.default:
            return self._norm(*args)
        if node.target is operator.getitem and args[0].target is aten.native_layer_norm.default and args[1] == 0:
            return self.at[args[0]]
        if ops.drawn(node):
            raise Unrecognized("an expert draws random numbers (dropout inside it)")
        if node.target is not operator.getitem and not isinstance(node.target, torch._ops.OpOverload):
            raise Unrecognized(f"{getattr(node.target, '__name__', node.target)} inside an expert")
        name = "getitem" if node.target is operator.getitem else str(node.target)
        given = tuple(self._argument(a) for a in args)
        return self._add(name, given, tuple((k, self._argument(v)) for k, v in node.kwargs.items()))

    def _product(self, x: fx.Node, matrix: fx.Node, bias: fx.Node | None, flipped: bool) -> int:
        if matrix not in self.params:
            matrix, flipped = matrix.args[0], not flipped  # type: ignore[assignment]
        if matrix not in self.params or x not in self.at or x in self.params:
            raise Unrecognized("a product of something else than rows and a parameter")
        out = self._add("linear" if flipped else "matmul", (("%", self.at[x]), ("%", self.at[matrix])))
        if bias is None:
            return out
        return self._add("aten.add.Tensor", (("%", out), self._argument(bias)))

    def _norm(self, x: fx.Node, shape: list[int], scale: Any, shift: Any, eps: float) -> int:
        """Each row is normalized, then scaled and shifted by what its own expert has."""
        out = self._add("aten.layer_norm.default", (self._argument(x), tuple(shape), None, None, eps))
        for name, by in (("aten.mul.Tensor", scale), ("aten.add.Tensor", shift)):
            out = out if by is None else self._add(name, (("%", out), self._argument(by)))
        return out

    def _argument(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v) for v in value)
        if not isinstance(value, fx.Node):
            return value
        if value in self.params:
            if len(value.meta["spec"].shape) != 1:
                raise Unrecognized("a parameter of an expert that is neither a matrix of a product nor a vector")
            return ("%", self._add("each", (("%", self.at[value]),)))
        if value not in self.at:
            raise Unrecognized("a parameter of an expert is computed with before it meets a row")
        return ("%", self.at[value])
