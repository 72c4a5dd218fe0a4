"""From what a layer of experts was seen to compute to what one expert computes."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.grouped import Body
from autopar.ir.program import Spec
from autopar.trace.builder import Builder
from autopar.trace.record import Recorder, Unrecognized

aten = torch.ops.aten
Step = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]
CASTS = (aten._to_copy.default, aten.to.dtype)
ZEROS = (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)


@dataclass(frozen=True)
class Share:
    """What one addition puts into the result: rows of the tokens ``tokens``, computed by ``source``."""

    tokens: Tensor
    source: fx.Node


class Reading:
    """One recorded call: tokens [T, H], choices ``index`` [T, k], and the graph that ends in ``out``."""

    def __init__(self, seen: Recorder, out: fx.Node, index: Tensor) -> None:
        self.seen, self.out, self.index = seen, out, index
        self.names: dict[fx.Node, str] = {
            n: n.meta["name"] for n in seen.graph.find_nodes(op="placeholder") if "name" in n.meta
        }

    def chains(self) -> list[tuple[Step, ...]]:
        """What each expert computes. Raises Unrecognized unless the result is Σ weight · expert(token), all once."""
        used = torch.zeros(self.index.numel(), dtype=torch.long)
        chains = {}
        for share in self._shares():
            product = _uncast(share.source)
            weights, y = self._factors(product)
            places = self._places(weights)
            ids = self.index.reshape(-1)[places].unique()
            if len(ids) != 1 or not torch.equal(places // self.index.shape[1], share.tokens):
                raise Unrecognized("rows are not those of one expert")
            used[places] += 1
            chains[int(ids)] = _Chain(self, int(ids), share.tokens).steps(y)
        if not bool((used == 1).all()):
            raise Unrecognized("some choices count not once")
        return list(chains.values())

    def _shares(self) -> Iterator[Share]:
        node = self.out
        while node.target not in ZEROS:
            if node.target is aten.detach.default:
                node = node.args[0]  # type: ignore[assignment]
                continue
            before, tokens, source = _addition(node)
            if source.meta["val"].shape[0]:
                yield Share(tokens, source)
            node = before

    def _factors(self, product: fx.Node) -> tuple[fx.Node, fx.Node]:
        if product.target is not aten.mul.Tensor or len(product.args) != 2:
            raise Unrecognized("results are not weighted last")
        for weights, y in (product.args, product.args[::-1]):
            if isinstance(weights, fx.Node) and isinstance(y, fx.Node) and self._reads(weights) == {"weights"}:
                return weights, y
        raise Unrecognized("results are not weighted by what was given")

    def _reads(self, node: fx.Node) -> set[str]:
        """Names of the inputs behind a node."""
        found, todo, done = set(), [node], {node}
        while todo:
            n = todo.pop()
            if n in self.names:
                found.add(self.names[n])
            fresh = [a for a in n.all_input_nodes if a not in done]
            done.update(fresh)
            todo += fresh
        return found

    def _places(self, weights: fx.Node) -> Tensor:
        """Which choices the weights are those of: the same selection, of the choices' numbers."""
        numbers = torch.arange(self.index.numel(), dtype=torch.float64).view(self.index.shape)
        return self._compute(weights, numbers).reshape(-1).long()

    def _compute(self, node: fx.Node, numbers: Tensor) -> Tensor:
        if node in self.names:
            return numbers
        if "value" in node.meta:
            value: Tensor = node.meta["value"]
            return value
        if node.target in CASTS:
            return self._compute(node.args[0], numbers)  # type: ignore[arg-type]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._compute(n, numbers))
        target: Any = node.target
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        made: Tensor = target(*args, **kwargs)
        return made


@dataclass
class _Chain:
    """What one expert computes for its tokens, as steps: value 0 is its rows, then its parameters, then the steps."""

    reading: Reading
    expert: int
    tokens: Tensor

    def steps(self, y: fx.Node) -> tuple[Step, ...]:
        """The steps that end in ``y``."""
        self.params = [n for n, name in self.reading.names.items() if name not in ("hidden", "weights")]
        nodes = self._behind(y)
        leaves = {n: i for n in nodes if (i := self._leaf(n)) is not None}
        return _steps(nodes, leaves, 1 + len(self.params))

    def _behind(self, y: fx.Node) -> list[fx.Node]:
        """The nodes behind ``y``, in order, as far as the expert's rows and parameters."""
        found, todo = {y}, [y]
        while todo:
            node = todo.pop()
            inputs = [] if self._leaf(node) is not None else [n for n in node.all_input_nodes if n not in found]
            found.update(inputs)
            todo += inputs
        return [n for n in self.reading.seen.graph.nodes if n in found]

    def _leaf(self, node: fx.Node) -> int | None:
        """Number of the value that a selection of rows, or of the expert's parameter, is; None for an op."""
        if node.op == "placeholder" or node.target is aten.detach.default:
            raise Unrecognized("an expert reads more than its rows and its parameters")
        source = node.args[0] if node.args else None
        if source not in self.reading.names:
            return None
        chosen = _chosen(node)
        if self.reading.names[source] == "hidden":  # type: ignore[index]
            if chosen is not None and torch.equal(torch.as_tensor(chosen), self.tokens):
                return 0
        elif chosen is not None and torch.equal(torch.as_tensor(chosen), torch.as_tensor(self.expert)):
            return 1 + self.params.index(source)  # type: ignore[arg-type]
        raise Unrecognized("a selection that is not the expert's")


def steps_of(seen: Recorder, leaves: list[fx.Node], result: fx.Node) -> tuple[Step, ...]:
    """The recorded ops behind a result as steps; value i is ``leaves[i]``. Raises Unrecognized for other inputs."""
    found, todo = {result}, [result]
    while todo:
        fresh = [n for n in todo.pop().all_input_nodes if n not in found]
        found.update(fresh)
        todo += fresh
    nodes = [n for n in seen.graph.nodes if n in found]
    if any(n.op == "placeholder" and n not in leaves for n in nodes):
        raise Unrecognized("an expert reads more than its rows and its parameters")
    return _steps(nodes, {n: i for i, n in enumerate(leaves)}, len(leaves))


def _steps(nodes: list[fx.Node], leaves: Mapping[fx.Node, int], count: int) -> tuple[Step, ...]:
    """Nodes in order as steps, the last one's last; ``leaves`` are the numbers of values below ``count``."""
    made: list[Step] = []
    at = dict(leaves)
    for node in nodes:
        if node not in leaves:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: ("%", at[n]))
            made.append((node.target, _frozen(args), tuple((k, _frozen(v)) for k, v in kwargs.items())))
            at[node] = count + len(made) - 1
    if not made:
        raise Unrecognized("an expert that computes nothing")
    return tuple(made)


def _chosen(node: fx.Node) -> Any:
    """What of dim 0 an op selects; None where it does something else."""
    if node.target is aten.select.int and node.args[1] == 0:
        return node.args[2]
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        return node.args[1][0].meta.get("value")  # type: ignore[index, union-attr]
    if node.target is aten.index_select.default and node.args[1] == 0:
        return node.args[2].meta.get("value")  # type: ignore[union-attr]
    return None


def _addition(node: fx.Node) -> tuple[fx.Node, Tensor, fx.Node]:
    """(what it adds to, rows, what it adds) of ``index_add``, or of ``x[rows] += y``."""
    args: Any = node.args
    if node.target is aten.index_add.default and args[1] == 0 and not node.kwargs and "value" in args[2].meta:
        return args[0], args[2].meta["value"], args[3]
    if node.target is aten.index_put.default and len(args[1]) == 1 and "value" in args[1][0].meta:
        rows, value = args[1][0].meta["value"], args[2]
        if args[3:] == (True,):
            return args[0], rows, value
        if value.target is aten.add.Tensor and not value.kwargs and len(rows.unique()) == len(rows):
            for old, new in (value.args, value.args[::-1]):
                same = isinstance(old, fx.Node) and old.args[:1] == (args[0],) and _chosen(old) is not None
                if same and torch.equal(_chosen(old), rows):
                    return args[0], rows, new
    raise Unrecognized("the result is no sum over experts")


def _uncast(node: fx.Node) -> fx.Node:
    while node.target in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    return node


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
        target = operator.getitem if getattr(target, "__name__", "") == "_getitem" else target
        values.append(build.apply(target, *given, **{k: _thawed(v, values) for k, v in kwargs}))
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
