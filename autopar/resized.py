"""A trace with other rows and positions: the program that a trace at those sizes gives, without making it.

The example's sizes are known by their primes (``cost.family.Primes``), in specs as in the arguments of ops. What does
not come out as a whole number has no such program. Arguments and specs are checked against each other where a program
is lowered; a number that is no size and that a prime divides (what a mask is filled with) may change, which no price
reads.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import fx

from autopar.cost.family import Primes
from autopar.ir.program import Program, Spec


class NoSize(ValueError):
    """A size of the example that has no counterpart."""


@dataclass(frozen=True)
class Resize:
    """From the example's sizes to others. ``rows``: of the global batch. ``positions``: of a row, where it has any."""

    primes: Primes
    rows: int
    positions: int

    def size(self, length: int) -> int:
        """The counterpart of a size, or of any other number. Raises NoSize."""
        if length < 0:
            return -self.size(-length)
        left, out = length, Fraction(1)
        whole = 2 * (self.primes.positions or 0)
        rows, positions = Fraction(self.rows, self.primes.ways), Fraction(self.positions, 2)
        for prime, factor in ((self.primes.rows, rows), (self.primes.positions, positions)):
            while prime and left and left % prime == 0:
                left //= prime
                out *= factor
        if whole and left - whole in (-1, 1):
            left = self.positions + (left - whole)
        out *= left
        if out.denominator != 1:
            raise NoSize(str(length))
        return int(out)

    def value(self, value: Any) -> Any:
        """The counterpart of an argument."""
        return self.size(value) if type(value) is int else value

    def spec(self, spec: Any) -> Any:
        """The counterpart of a spec, or of several."""
        if isinstance(spec, tuple):
            return tuple(map(self.spec, spec))
        return replace(spec, shape=tuple(map(self.size, spec.shape))) if isinstance(spec, Spec) else spec

    def __call__(self, program: Program) -> Program | None:
        """The program at the other sizes, with the global batch on one data rank; None where a size has none."""
        try:
            return self._program(program.clone())
        except NoSize:
            return None

    def _program(self, program: Program) -> Program:
        for _, graph in program.graphs():
            for node in graph.nodes:
                self._node(node)
        for name, param in program.params.items():
            if param.kind == "constant":
                program.params[name] = replace(param, spec=self.spec(param.spec))
        inputs = tuple(replace(i, spec=self.spec(i.spec)) for i in program.inputs)
        return replace(program, inputs=inputs, rows=(self.rows,) if program.rows else ())

    def _node(self, node: fx.Node) -> None:
        if "spec" in node.meta and not self._fixed(node):
            node.meta["spec"] = self.spec(node.meta["spec"])
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, self.value)
            node.kwargs = fx.node.map_aggregate(node.kwargs, self.value)

    def _fixed(self, node: fx.Node) -> bool:
        """Whether it is a parameter or a buffer, whose sizes the primes do not divide."""
        return node.op == "placeholder" and "param" in node.meta
