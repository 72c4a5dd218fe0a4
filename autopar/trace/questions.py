"""What Python asks of the choice of experts while a layer runs, and whether what it does with the answers is known.

A branch that the records did not take could compute anything. So of a question with two answers both must have been
seen, unless it has the same one whatever is chosen; of a number (how many tokens an expert has) several values must
have been seen, and all that it can have where it tells one token from another. That all records compute the same is
seen elsewhere.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autopar.trace.record import Unrecognized

aten = torch.ops.aten
RANKED = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim)
BEST = (aten.argmax.default, aten.argmin.default)
DRAWS = 3  # random choices for which answers are computed
EFFORT = 2**26  # elements that may be computed to find what else could have been answered
PLAIN, CHOSEN, MADE_UP = range(3)  # what a number comes from: constants, choices of experts, numbers that we made up
UNKNOWN = object()  # an answer that cannot be computed


@dataclass(frozen=True)
class Choice:
    """That a value is a choice: numbers below ``count``, those along ``dim`` different (None: each stands alone)."""

    count: int
    dim: int | None

    def like(self, old: Tensor, first: int | None, turned: bool, random: torch.Generator) -> Tensor:
        """Another choice in place of ``old``: ``first`` and the next ones for every token; None: random ones.

        ``turned``: what the last token would choose is chosen by the first one, and so on.
        """
        moved = old.unsqueeze(-1) if self.dim is None else old.movedim(self.dim, -1)
        k = moved.shape[-1]
        rows = moved.numel() // max(1, k)
        if first is None:
            made = torch.rand(rows, self.count, generator=random).topk(k, -1).indices
        else:
            made = ((first + torch.arange(k)) % self.count).expand(rows, k)
        made = (made.flip(0) if turned else made).reshape(moved.shape).to(old.dtype)
        return (made.squeeze(-1) if self.dim is None else made.movedim(-1, self.dim)).contiguous()


def choice_of(target: Any, args: Any, kwargs: Any) -> Choice | None:
    """What an op (or ``getitem`` of its results) chooses; None where its result is no choice."""
    if target in BEST:
        shape, dim = args[0].meta["val"].shape, _given(target, args, kwargs, "dim")
        kept = bool(_given(target, args, kwargs, "keepdim"))
        return Choice(shape.numel() if dim is None else shape[dim], dim if kept else None)
    if target is not operator.getitem or args[1] != 1 or args[0].target not in RANKED:
        return None
    maker = args[0]
    dim = _given(maker.target, maker.args, maker.kwargs, "dim")
    kept = bool(_given(maker.target, maker.args, maker.kwargs, "keepdim", True))
    return Choice(maker.args[0].meta["val"].shape[dim], dim if kept else None)


def _given(target: Any, args: Any, kwargs: Any, name: str, default: Any = None) -> Any:
    """An op's argument by name, or what it is where it is not given."""
    for i, a in enumerate(target._schema.arguments):
        if a.name == name:
            return args[i] if i < len(args) else kwargs.get(name, a.default_value)
    return default


def behind(nodes: Iterable[fx.Node], stop: bool = False) -> set[fx.Node]:
    """The nodes and all that they are computed from; ``stop``: as far as choices and what depends on none."""
    todo = list(nodes)
    found = set(todo)
    while todo:
        node = todo.pop()
        if not stop or ("choice" not in node.meta and node.meta["level"] != PLAIN):
            fresh = [n for n in node.all_input_nodes if n not in found]
            found.update(fresh)
            todo += fresh
    return found


Key = tuple[int | None, int, bool]  # another choice: ``first``, random draw, ``turned``
PAIRS: list[Key] = [(None, draw, turned) for draw in range(DRAWS) for turned in (False, True)]


@dataclass
class Question:
    """One number of a value that Python looked at.

    Args:
        node: the value. at: which of its numbers. behind: what it is computed from, in order, as far as the choices.
        seen: the answers. others: those that other choices would have; None where there is no such number.
    """

    node: fx.Node
    at: int
    behind: list[fx.Node]
    seen: set[Any] = field(default_factory=set)
    others: dict[Key, Any] = field(default_factory=dict)

    @property
    def several(self) -> bool:
        """Whether more than one answer was seen."""
        return len(self.seen) > 1

    @property
    def both(self) -> bool:
        """Whether all answers that there are were seen."""
        return self.several and all(isinstance(a, bool) for a in self.seen)

    @property
    def alike(self) -> bool:
        """Whether the answer stays the same where tokens change places."""
        pairs = [(self.others[a], self.others[b]) for a, b in zip(PAIRS[::2], PAIRS[1::2])]
        return all(UNKNOWN not in pair and len(set(pair)) == 1 for pair in pairs)

    @cached_property
    def firsts(self) -> list[Key]:
        """Choices in which tokens choose alike, as many as effort allows."""
        count = max(n.meta["choice"].count for n in self.behind if "choice" in n.meta)
        step = 1 + count * sum(n.meta["number"].numel() for n in self.behind if "number" in n.meta) // EFFORT
        return [(first, 0, False) for first in range(0, count, step)]

    def answer(self, key: Key, world: dict[fx.Node, Any]) -> None:
        """Compute the answer for another choice; ``world``: values for that choice, to which those behind are added."""
        first, draw, turned = key
        for node in self.behind:
            if node in world:
                continue
            if "choice" in node.meta:
                random = torch.Generator().manual_seed(draw)
                world[node] = node.meta["choice"].like(node.meta["number"], first, turned, random)
            else:
                world[node] = node.meta["number"] if node.meta["level"] == PLAIN else _computed(node, world)
        value = world[self.behind[-1]]
        if value is not None and value is not UNKNOWN:
            numbers = value.reshape(-1).tolist() if isinstance(value, Tensor) else [value]
            value = numbers[self.at] if self.at < len(numbers) else None
        self.others[key] = value


def _answer(questions: list[Question], keys: Callable[[Question], Iterable[Key]]) -> None:
    """Answer questions for the other choices ``keys``, one choice after the other: their values take memory."""
    todo: dict[Key, list[Question]] = {}
    for q in questions:
        for key in keys(q):
            if key not in q.others:
                todo.setdefault(key, []).append(q)
    for key, those in todo.items():
        world: dict[fx.Node, Any] = {}
        for q in those:
            q.answer(key, world)


class Questions:
    """What Python asked in all records of a layer."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], Question] = {}

    def add(
        self,
        nodes: list[fx.Node],
        asked: list[tuple[fx.Node, tuple[Any, ...]]],
        names: dict[fx.Node, str],
        about: list[fx.Node],
    ) -> None:
        """What was asked in one record.

        Args:
            names: of values, equal for what is computed alike. about: the choices of experts.
        Raises Unrecognized for a question about another choice.
        """
        order, allowed = {n: i for i, n in enumerate(nodes)}, behind(about)
        for node, answers in asked:
            inside = sorted(behind([node], stop=True), key=order.__getitem__)
            if any("choice" in n.meta and n not in allowed for n in inside):
                raise Unrecognized("Python asks for a number that says nothing of the choice of experts")
            for i, answer in enumerate(answers):
                question = self.known.setdefault((names[node], i), Question(node, i, inside))
                question.seen.add(answer)

    def open(self) -> list[Question]:
        """The questions that may have other answers, with which something else may be computed."""
        left = [q for q in self.known.values() if not q.both]
        _answer(left, lambda q: PAIRS)
        left = [q for q in left if not (q.several and q.alike)]
        _answer(left, lambda q: q.firsts)
        return [q for q in left if not set(q.others.values()) - {None} <= q.seen]


def _computed(node: fx.Node, world: dict[fx.Node, Any]) -> Any:
    """A node's value from those of its inputs; None where there is none."""
    for n in node.all_input_nodes:
        if world[n] is None or world[n] is UNKNOWN:
            return world[n]
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: world[n])
    target: Any = node.target
    try:
        return target(*args, **{k: None if k == "device" else v for k, v in kwargs.items()})
    except IndexError:
        return None
    except (RuntimeError, ValueError, TypeError):
        return UNKNOWN
