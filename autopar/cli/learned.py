"""What planning needs of a model that the command line names: kept from another time, or found out now."""

from autopar import shelf
from autopar.cli.configurations import configured
from autopar.cli.screen import Screen
from autopar.cost.hardware import Hardware
from autopar.shelf import Known


def learned(
    model: str, machine: Hardware, precision: str, positions: int | None, screen: Screen, *, fresh: bool = False
) -> Known:
    """The families of ``hf:NAME`` or ``module:callable`` on a profile.

    A configuration says all of a model, so what was kept for it is used; what a callable makes is looked at each time.

    Args:
        positions: of a row; what suits the model where None. fresh: whatever was kept.

    Raises what tracing the model raises.
    """
    kind, _, name = model.partition(":")
    if kind != "hf" or not name:
        return learn(model, machine, precision, positions)
    key = shelf.key(configured(name), machine, precision, positions)
    found = None if fresh else shelf.recall(key)
    if found is None:
        found = learn(model, machine, precision, positions)
        if trouble := shelf.keep(key, found):
            screen.say(f"the next plan for {model} takes as long: {trouble}")
    return found


def learn(model: str, machine: Hardware, precision: str, positions: int | None) -> Known:
    """The same, by tracing the model."""
    from autopar.cli.models import load
    from autopar.compile import uncollected
    from autopar.families import Example, families
    from autopar.planner import width_of

    loaded = load(model)
    loaded.model.train()
    length = positions or loaded.sequence
    kwargs = loaded.kwargs(2, length)
    with uncollected():
        made = families(loaded.model, (), kwargs, hardware=machine, precision=precision)
    title = loaded.description.removeprefix(f"{model}: ")
    sequential = Example.of((), kwargs).positions is not None
    return Known(tuple(made.values()), title, length, width_of(loaded.model), sequential)
