"""Plans as they are predicted to run, closer than a search looks at them."""

from dataclasses import replace

from torch import nn

from autopar.cost.rehearsal import Rehearsal, rehearse
from autopar.planner import regime_of
from autopar.plans import Plan

MOST = 100_000  # actions of a step that are simulated


def rehearsed(plan: Plan, model: nn.Module, precision: str, positions: int) -> Rehearsal | None:
    """A plan's step in time and memory; None where it has more than ``MOST`` actions.

    Args:
        model: that was planned. precision: as ``Strategy.precision``. positions: of a row.
    """
    option = plan.option
    if option.sizes["pp"] * option.virtual * option.microbatches > MOST:
        return None
    forms = next(t.forms for t in plan.found.tables if t.forms.family.sequence == option.sequence)
    return rehearse(forms, plan.hardware, option, regime_of(model, precision), positions)


def closer(plan: Plan, found: Rehearsal | None) -> Plan:
    """The plan with the seconds and bytes of its rehearsal."""
    return plan if found is None else replace(plan, option=found.option)
