"""Plans as they are predicted to run, closer than a search looks at them."""

from dataclasses import replace

from autopar.cost.rehearsal import Rehearsal, rehearse
from autopar.plans import Plan

MOST = 100_000  # actions of a step that are simulated


def rehearsed(plan: Plan) -> Rehearsal | None:
    """A plan's step in time and memory; None where it has more than ``MOST`` actions."""
    option, question = plan.option, plan.found.question
    if option.sizes["pp"] * option.virtual * option.microbatches > MOST:
        return None
    forms = next((f for f in question.forms if f.family.sequence == option.sequence), question.forms[0])
    return rehearse(forms, plan.hardware, option, question.regime, question.space.positions)


def closer(plan: Plan, found: Rehearsal | None) -> Plan:
    """The plan with the seconds and bytes of its rehearsal."""
    return plan if found is None else replace(plan, option=found.option)
