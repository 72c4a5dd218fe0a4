"""What planning needs of a model that the command line names: kept from another time, or found out now."""

import warnings
from collections.abc import Sequence

from autopar import shelf
from autopar.cli.configurations import configured
from autopar.cli.screen import Screen
from autopar.cost.hardware import Hardware
from autopar.errors import AutoparWarning
from autopar.shelf import Known


def learned(
    model: str, machine: Hardware, precision: str, positions: int | None, screen: Screen, *, fresh: bool = False
) -> Known:
    """The families of ``hf:NAME`` or ``module:callable`` on a profile.

    A configuration says all of a model, so what was kept for it, or came with autopar, is used; what a callable makes
    is looked at each time.

    Args:
        positions: of a row; what suits the model where None. fresh: whatever was kept.

    Raises what tracing the model raises.
    """
    found = _found(model, machine, precision, positions, screen, fresh)
    for note in found.notes:
        screen.say(f"warning: {note}")
    return found


def _found(model: str, machine: Hardware, precision: str, positions: int | None, screen: Screen, fresh: bool) -> Known:
    kind, _, name = model.partition(":")
    if kind != "hf" or not name:
        return learn(model, machine, precision, positions)
    configuration = configured(name)
    key = shelf.key(configuration, machine, precision, positions)
    found = None if fresh else shelf.shipped(configuration, machine, precision, positions) or shelf.recall(key)
    if found is None:
        found = learn(model, machine, precision, positions)
        if trouble := shelf.keep(key, found):
            screen.say(f"the next plan for {model} takes as long: {trouble}")
    return found


def learn(model: str, machine: Hardware, precision: str, positions: int | None) -> Known:
    """The same, by tracing the model."""
    return learn_on([machine], model, precision, positions)[0]


def learn_on(machines: Sequence[Hardware], model: str, precision: str, positions: int | None) -> list[Known]:
    """The same on each of several profiles, of one trace."""
    from autopar.cli.models import load
    from autopar.families import Example, families_on
    from autopar.planner import width_of

    loaded = load(model)
    loaded.model.train()
    length = positions or loaded.sequence
    kwargs = loaded.kwargs(2, length)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = families_on(machines, loaded.model, (), kwargs, precision=precision)
    notes = tuple(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, AutoparWarning)))
    title = loaded.description.removeprefix(f"{model}: ")
    sequential, width = Example.of((), kwargs).positions is not None, width_of(loaded.model)
    return [Known(tuple(m.values()), title, length, width, sequential, notes) for m in made]
