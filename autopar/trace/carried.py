"""What calls leave in plain attributes for later calls, from trace to trace; tensors as the ops that make them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from autopar.ir.modules import named
from autopar.ir.program import Param, Spec
from autopar.trace.blueprint import mode_of
from autopar.trace.layers import exact
from autopar.trace.state import ABSENT, DEPTH, Place, Snapshot, tensors_in

if TYPE_CHECKING:
    from autopar.trace.export import Exported


@dataclass(eq=False)
class Stand:
    """Stands for a tensor."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass
class State:
    """Attributes as calls left them. Tensors in them are stand-ins; ``recipe`` computes them from buffers alone.

    ``recipe``: a graph whose placeholders carry ``meta["param"]``: a buffer, or one of ``constants``.
    """

    modules: dict[str, nn.Module]  # those of the model that was traced, by path
    values: dict[Place, Any]
    buffers: frozenset[Place]  # places that are registered buffers
    stands: list[Stand] = field(default_factory=list)
    recipe: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)
    hooks: dict[Place, dict[Any, Any]] = field(default_factory=dict)  # where calls set some: such a state is not kept

    @classmethod
    def of(cls, after: Snapshot, kept: Sequence[Place], tensors: Sequence[Tensor]) -> "State | None":
        """The state ``after`` a call at the places ``kept``, but for what cannot be copied; None where that is all.

        The recipe is empty.
        """
        stands = [Stand(t.shape, t.dtype) for t in tensors]
        memo: dict[int, Any] = {id(t): s for t, s in zip(tensors, stands)} | {id(m): m for m in after.modules.values()}
        values: dict[Place, Any] = {}
        for place in kept:
            with suppress(Exception):  # what deepcopy of a user's object raises is not known
                values[place] = deepcopy(value_at(after, place), memo)
        if not values or (stands and len(values) < len(kept)):
            return None
        buffers = frozenset(p for p in kept if p[1] in after.tensors[p[0], "_buffers"])
        return cls(after.modules, values, buffers, stands)

    def without(self, places: Collection[Place]) -> "State | None":
        """What it says of other places; None where that is nothing."""
        values = {p: v for p, v in self.values.items() if p not in places}
        return replace(self, values=values) if values else None

    def same(self, other: "State") -> bool:
        """Whether a call that begins with either computes the same."""
        one, two = (self.recipe, self.constants), (other.recipe, other.constants)
        plain = not self.hooks and not other.hooks and self.buffers == other.buffers and self._looks() == other._looks()
        return plain and (not self.stands or alike(one, two, 0, 0))

    def _looks(self) -> Any:
        """The values, equal for what a trace cannot tell apart but by the recipe."""
        memo: dict[int, Any] = {id(m): ("module", path) for path, m in self.modules.items()}
        memo |= {id(s): ("tensor", i, tuple(s.shape), s.dtype) for i, s in enumerate(self.stands)}
        return {place: exact(value, DEPTH) for place, value in deepcopy(self.values, memo).items()}

    def over(self, earlier: "State") -> "State":
        """This state, which has no stand-ins, and what an ``earlier`` one says of other places."""
        memo: dict[int, Any] = {id(m): self.modules[path] for path, m in earlier.modules.items()}
        memo |= {id(s): s for s in earlier.stands}
        values = {**deepcopy(earlier.values, memo), **self.values}
        return replace(
            self, values=values, buffers=self.buffers | earlier.buffers,
            stands=earlier.stands, recipe=earlier.recipe, constants=earlier.constants,
        )  # fmt: skip

    def install(self, modules: Mapping[str, nn.Module], tensors: Sequence[Tensor]) -> None:
        """Put the attributes into the modules of a model, with ``tensors`` in place of the stand-ins."""
        memo: dict[int, Any] = {id(m): modules[path] for path, m in self.modules.items()}
        memo |= {id(s): t for s, t in zip(self.stands, tensors)}
        for (path, name), value in zip(self.values, deepcopy(list(self.values.values()), memo)):
            held = modules[path].__dict__
            held.pop(name, None)
            if (path, name) in self.buffers:
                held["_buffers"][name] = value
            elif value is not ABSENT:
                held[name] = value
        for (path, kind), hooks in self.hooks.items():
            modules[path].__dict__[kind].update(hooks)

    @property
    def lasting(self) -> "State | None":
        """The state for other copies of the model; None with hooks, which know the modules that they were set on."""
        return None if self.hooks else self

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """While the context lasts, a model has the attributes; only without stand-ins."""
        modules = named(model)
        before = Snapshot.of(modules)
        try:
            self.install(modules, [])
            yield
        finally:
            before.restore()

    def zeros(self, model: nn.Module) -> list[Tensor]:
        """A tensor for each stand-in, for a trace of ``model``."""
        device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
        with mode_of(model) or nullcontext():
            return [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in self.stands]

    def define(self, exported: "Exported") -> bool:
        """Take the recipe from a graph that has the tensors as its last results; False where it needs more."""
        written = {name for kind, name in exported.outputs if kind == "buffer"}
        kinds = {n: p.kind for n, p in exported.params.items() if n not in written}
        results = _results(exported.graph)[len(exported.outputs) - len(self.stands) :]
        recipe = recipe_of(exported.graph, results, lambda n: kinds.get(n) in ("buffer", "constant"))
        if recipe is None:
            return False
        self.recipe = recipe
        for node in recipe.find_nodes(op="placeholder"):
            if (name := node.meta["param"]) in exported.constants:
                new = name if name in self.constants else f"carried.{len(self.constants)}.{name}"
                self.constants[new], node.meta["param"] = exported.constants[name], new
        return True


def inline(state: State, exported: "Exported") -> None:
    """Put the recipe in place of the inputs that stand for its results: a graph's last ones."""
    graph, number = exported.graph, len(state.stands)
    held = graph.find_nodes(op="placeholder")
    taken = sorted((n for n in held if "input" in n.meta), key=lambda n: n.meta["input"])
    copies: dict[fx.Node, fx.Node] = {}
    known = {n.meta["param"]: n for n in held if "param" in n.meta}
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        for node in state.recipe.nodes:
            name = node.meta.get("param") if node.op == "placeholder" else None
            if node.op != "output":
                copies[node] = known.get(name) or graph.node_copy(node, copies.__getitem__)
    results = _results(state.recipe) if number else []
    for node, made in zip(taken[len(taken) - number :], results, strict=True):
        node.replace_all_uses_with(copies[made])
        graph.erase_node(node)
    for name, value in state.constants.items():
        exported.constants[name] = value
        exported.params[name] = Param(name, Spec(tuple(value.shape), value.dtype), "constant", False, False)


def value_at(after: Snapshot, place: Place) -> Any:
    """What an attribute or a registered buffer is in a snapshot."""
    path, name = place
    return after.attributes[path].get(name, after.tensors[path, "_buffers"].get(name, ABSENT))


def kept_tensors(after: Snapshot, kept: Sequence[Place]) -> list[Tensor]:
    """The tensors that the places hold, each once."""
    return list({id(t): t for place in kept for t in tensors_in(value_at(after, place))}.values())


def recipe_of(graph: fx.Graph, results: Sequence[fx.Node], fixed: Callable[[str], bool]) -> fx.Graph | None:
    """A graph of ``results`` alone; None where they follow from more than buffers that are ``fixed`` by name."""
    needed: set[fx.Node] = set()
    left = list(results)
    while left:
        node = left.pop()
        if node in needed:
            continue
        needed.add(node)
        left += node.all_input_nodes
        if node.op == "placeholder" and not fixed(node.meta.get("param", "")) or is_drawn(node):
            return None
    out, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in needed:
            copies[node] = out.node_copy(node, copies.__getitem__)
            copies[node].meta.pop("nn_module_stack", None)  # made before any layer is called
    out.output(tuple(copies[n] for n in results))
    return out


def is_drawn(node: fx.Node) -> bool:
    """Whether a node gives random numbers, or cannot be told from its arguments."""
    tags = getattr(node.target, "tags", ())
    return node.op == "get_attr" or torch.Tag.nondeterministic_seeded in tags


def alike(
    first: tuple[fx.Graph, Mapping[str, Tensor]], second: tuple[fx.Graph, Mapping[str, Tensor]], inputs: int, kept: int
) -> bool:
    """Whether two traced graphs compute the same, the second with what the first made in place of its last inputs.

    Args:
        first, second: each with the values of its constants; results are in the same order.
        inputs: how many inputs both have in common.
        kept: how many results of the first, its last ones, are the second's further inputs.
    """
    known: dict[Any, int] = {}
    one = _numbered(*first, known, {})
    results = _results(first[0])
    made = {inputs + i: one[n] for i, n in enumerate(results[len(results) - kept :])}
    two = _numbered(*second, known, made)
    return [one[n] for n in results[: len(results) - kept]] == [two[n] for n in _results(second[0])]


def _results(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _numbered(
    graph: fx.Graph, constants: Mapping[str, Tensor], known: dict[Any, int], made: Mapping[int, int]
) -> dict[fx.Node, int]:
    """A number for each node, the same for what computes the same from the same."""
    out: dict[fx.Node, int] = {}
    drawn = 0
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.meta.get("input") in made:
            out[node] = made[node.meta["input"]]
            continue
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: _Number(out[n]))
        key: Any = (str(node.target), repr(args))
        if node.op == "placeholder":
            name = node.meta.get("param")
            key = _content(constants[name]) if name in constants else ("placeholder", name, node.meta.get("input"))
        elif is_drawn(node):
            key, drawn = (*key, drawn), drawn + 1
        out[node] = known.setdefault(key, len(known))
    return out


class _Number(int):
    """A number of a node, other than an int."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _content(value: Tensor) -> Any:
    """What tells a constant from others: its numbers, where it has some."""
    if type(value) is not Tensor or value.is_meta:
        return ("constant", id(value))
    return (
        "constant",
        value.dtype,
        tuple(value.shape),
        value.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(),
    )
