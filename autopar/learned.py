"""What planning needs of a model that is named: kept from another time, or found out now."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autopar import shelf
from autopar.configurations import configured
from autopar.cost.forms import Forms
from autopar.cost.hardware import Hardware
from autopar.cost.regime import ours
from autopar.errors import AutoparWarning
from autopar.ir.mesh import KNOWN_AXES
from autopar.plans import Plans
from autopar.ranking import LOWERED, SPARE, lowered, planned, space_of
from autopar.shelf import Known

if TYPE_CHECKING:
    from autopar.families import Sample
    from autopar.lowering import Lowering
    from autopar.models import LoadedModel

Say = Callable[[str], None]


@dataclass
class Named:
    """A model by its name, loaded and traced when that is needed.

    Args:
        text: ``hf:NAME`` or ``module:callable``. precision: as ``Strategy.precision``. positions: of a row; what suits
            the model where None. fresh: whatever was kept. say: is told warnings.
    """

    text: str
    precision: str = "bf16"
    positions: int | None = None
    fresh: bool = False
    say: Say = lambda note: None
    _sample: "Sample | None" = field(default=None, repr=False)

    @property
    def configured(self) -> bool:
        """Whether a configuration says all of the model, so that what is known of it can be kept."""
        kind, _, name = self.text.partition(":")
        return kind == "hf" and bool(name)

    @cached_property
    def loaded(self) -> "LoadedModel":
        """The model in train mode, without weights."""
        from autopar.models import load  # which loads torch

        found = load(self.text)
        found.model.train()
        return found

    @property
    def kwargs(self) -> dict[str, Any]:
        """Example inputs."""
        return self.loaded.kwargs(2, self.positions or self.loaded.sequence)

    def learn_on(self, machines: Sequence[Hardware]) -> list[Known]:
        """What planning needs on each of several profiles, of one trace."""
        from autopar.families import Example, Sample, width_of

        kwargs = self.kwargs
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._sample = Sample.of(self.loaded.model, (), kwargs, precision=self.precision)
            made = [self._sample.families(machine) for machine in machines]
        notes = tuple(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, AutoparWarning)))
        title = self.loaded.description.removeprefix(f"{self.text}: ")
        sequential, width = Example.of((), kwargs).positions is not None, width_of(self.loaded.model)
        length = self.positions or self.loaded.sequence
        return [Known(tuple(m.values()), title, length, width, sequential, notes) for m in made]

    def known(self, machine: Hardware) -> Known:
        """The same on one: what was kept for its configuration, or came with autopar, or is found out now.

        What a callable makes is looked at each time. Raises what tracing the model raises.
        """
        found = self._kept(machine) if self.configured else self.learn_on([machine])[0]
        for note in found.notes:
            self.say(f"warning: {note}")
        return found

    def _kept(self, machine: Hardware) -> Known:
        configuration = configured(self.text.partition(":")[2])
        asked = configuration, machine, self.precision, self.positions
        key = shelf.key(*asked)
        found = None if self.fresh else shelf.shipped(*asked) or shelf.recall(key)
        if found is None:
            found = self.learn_on([machine])[0]
            if trouble := shelf.keep(key, found):
                self.say(f"the next plan for {self.text} takes as long: {trouble}")
        return found

    def lowering(self) -> "Lowering":
        """Lowers plans of the model; by the trace of its families where that was made."""
        from autopar.lowering import Lowering

        return Lowering(self.loaded.model, (), self.kwargs, self.precision, sample=self._sample)


def plan_named(
    model: Named, known: Known, machine: Hardware, *, batch: int | None = None, axes: tuple[str, ...] = KNOWN_AXES,
    fixed: tuple[tuple[str, int], ...] = (), given: tuple[tuple[str, Any], ...] = (), count: int = 10,
    lower: int | None = None,
) -> Plans:  # fmt: skip
    """The fastest strategies for a named model; arguments as of ``planner.plan``.

    Args:
        lower: where None, ``LOWERED`` of what a callable makes, and none of what a configuration says: they would take
            a trace that the answer needs for nothing else.
    """
    positions = known.positions if model.positions or known.sequential else 1
    space = space_of(machine, batch, positions, axes, fixed, given)
    forms, regime = [Forms(f) for f in known.families], ours(known.width, model.precision)
    number = lower if lower is not None else 0 if model.configured else LOWERED
    if not number:
        return planned(forms, machine, space, regime, count)
    plans = planned(forms, machine, space, regime, max(count, number) + SPARE)
    return lowered(plans, model.lowering(), number, count)
