"""Names that differ in numbers only, written as ranges: ``layers.0-31.weight``."""

import re
from collections.abc import Hashable, Iterable
from itertools import product
from typing import TypeVar

Fact = TypeVar("Fact", bound=Hashable)
NUMBER = r"(?<![^.])\d+(?![^.])"


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def fold(items: Iterable[tuple[str, Fact]]) -> list[tuple[str, Fact]]:
    """Join the names with equal facts that differ in numeric components only, in order of their first appearance.

    A group is joined only where its numbers are a full grid, so that the folded name means exactly its members.
    """
    groups: dict[tuple[str, Fact], list[tuple[int, ...]]] = {}
    for name, fact in items:
        found = tuple(int(n) for n in re.findall(NUMBER, name))
        groups.setdefault((re.sub(NUMBER, "{}", name), fact), []).append(found)
    out: list[tuple[str, Fact]] = []
    for (pattern, fact), points in groups.items():
        columns = [sorted(set(column)) for column in zip(*points)]
        if len(points) > 1 and set(points) == set(product(*columns)):
            out.append((pattern.format(*(ranges(c) for c in columns)), fact))
        else:
            out += [(pattern.format(*point), fact) for point in points]
    return out
