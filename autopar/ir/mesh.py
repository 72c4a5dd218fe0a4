"""The mesh of ranks: named axes, coordinates, and which axes carry data."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autopar.errors import AutoparError

KNOWN_AXES = ("pp", "dp", "ep", "cp", "tp")
DATA_AXES = ("dp", "ep")
SUMMED_AXES = (*DATA_AXES, "cp")
TIME = "mb"


@dataclass(frozen=True)
class Mesh:
    """Named axes with their sizes, major to minor, as in ``DeviceMesh``.

    ``axes`` may hold sub-axes (``tp0``, ``tp1``) once ``split`` was called; ``user_axes`` are those the user gave.
    ``microbatches`` is the size of the axis ``mb``, which is executed in time: it has no ranks.
    """

    axes: tuple[tuple[str, int], ...]
    user_axes: tuple[tuple[str, int], ...] = ()
    microbatches: int = 1

    def __post_init__(self) -> None:
        if not self.user_axes:
            object.__setattr__(self, "user_axes", self.axes)

    def __hash__(self) -> int:
        """Of the axes, kept: answers about a mesh and a layout are looked up for every parameter."""
        try:
            return self._hash  # type: ignore[attr-defined]
        except AttributeError:
            known = self.__dict__["_hash"] = hash((self.axes, self.user_axes, self.microbatches))
            return known

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process has another of."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @staticmethod
    def parse(text: str) -> "Mesh":
        """``"dp=2,tp=4"`` to a mesh. Raises AutoparError ``bad-mesh``."""
        axes = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            match = re.fullmatch(r"([a-z_]\w*)\s*=\s*(-?\d+)", part)
            if not match:
                raise AutoparError("bad-mesh", f"mesh {text!r}: {part!r} is not axis=size", "write dp=2,tp=4")
            axes.append((match[1], int(match[2])))
        return Mesh.of(dict(axes)) if len(dict(axes)) == len(axes) else _refuse(text, "an axis is named twice")

    @staticmethod
    def of(sizes: Mapping[str, int]) -> "Mesh":
        """A mesh of known axes with positive sizes. Raises AutoparError ``bad-mesh``."""
        text = ",".join(f"{a}={n}" for a, n in sizes.items())
        for axis, size in sizes.items():
            if axis not in KNOWN_AXES:
                _refuse(text, f"unknown axis {axis!r}; known axes are {', '.join(KNOWN_AXES)}")
            if size < 1:
                _refuse(text, f"axis {axis} has size {size}; sizes are at least 1")
        return Mesh(tuple(sizes.items()))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(n for _, n in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, major to minor."""
        return tuple(a for a, _ in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along ``axis`` (steps along ``mb``), sub-axes together; 1 where the mesh lacks it."""
        sizes = {**dict(self.axes), TIME: self.microbatches}
        return sizes[axis] if axis in sizes else dict(self.user_axes).get(axis, 1)

    def base(self, axis: str) -> str:
        """The user's axis that ``axis`` belongs to: ``tp1`` to ``tp``."""
        return axis if axis in dict(self.user_axes) else axis.rstrip("0123456789")

    def parts(self, axis: str) -> tuple[str, ...]:
        """The axes of this mesh that make up the user's axis, major to minor."""
        return tuple(a for a, _ in self.axes if self.base(a) == axis)

    def is_data(self, axis: str) -> bool:
        """Whether ranks (or steps) along the axis hold different rows of the batch."""
        return self.base(axis) in (*DATA_AXES, TIME)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that carry data, in mesh order."""
        return tuple(a for a in self.names if self.is_data(a))

    @property
    def data_size(self) -> int:
        """Number of ranks that hold different rows."""
        return math.prod(self.size(a) for a in self.data_axes)

    def place(self, axes: Iterable[str], at: Mapping[str, int]) -> int:
        """The place of the rank at ``at`` among those along ``axes``, row-major in their order."""
        index = 0
        for axis in axes:
            index = index * self.size(axis) + at[axis]
        return index

    def data_rank(self, at: Mapping[str, int]) -> int:
        """Which of a batch's ``data_size`` parts the rank at ``at`` reads, counted row-major over the data axes."""
        return self.place(self.data_axes, at)

    def is_summed(self, axis: str) -> bool:
        """Whether the loss is a P over the axis and whole parameters are R: the engine alone sums their gradients."""
        return self.base(axis) in (*SUMMED_AXES, TIME)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes over which the engine sums gradients, in mesh order: those of data, and context."""
        return tuple(a for a in self.names if self.is_summed(a))

    @property
    def summed_size(self) -> int:
        """Number of ranks over which the engine sums gradients."""
        return math.prod(self.size(a) for a in self.summed_axes)

    def split(self, axis: str, major: int) -> "Mesh":
        """The mesh with ``axis`` as two sub-axes, ``axis0`` of size ``major`` and ``axis1`` of the rest."""
        size = self.size(axis)
        assert size % major == 0
        parts = ((f"{axis}0", major), (f"{axis}1", size // major))
        axes = tuple(p for a, n in self.axes for p in (parts if a == axis else ((a, n),)))
        return replace(self, axes=axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Each axis's coordinate of ``rank``, row-major."""
        out = {}
        for axis, size in reversed(self.axes):
            out[axis], rank = rank % size, rank // size
        return dict(reversed(out.items()))

    def __iter__(self) -> Iterator[dict[str, int]]:
        """Coordinates of every rank in order."""
        for point in product(*(range(n) for _, n in self.axes)):
            yield dict(zip(self.names, point))

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in self.user_axes)


def _refuse(text: str, why: str) -> "Mesh":
    raise AutoparError("bad-mesh", f"mesh {text}: {why}", "give axes among pp, dp, ep, cp, tp with sizes >= 1")
