"""``--html`` and ``--trace``: plans as one page, and as a timeline."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.screen import Screen
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.cli.measured import Pair
    from autopar.cost.rehearsal import Rehearsal
    from autopar.models import LoadedModel
    from autopar.plans import Plan
    from autopar.report.page import Layers

    Steps = Sequence[tuple[str, Plan, Rehearsal | None]]
EXAMPLE = 64  # positions of the layer that is drawn, at most: sizes grow with them, the picture does not


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """--html and --trace."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="write charts as one page that works offline")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the simulated steps for Perfetto")


def draw(
    args: argparse.Namespace, screen: Screen, steps: "Steps", pairs: "Sequence[Pair]" = (),
    front: "Sequence[Plan]" = (),
) -> None:  # fmt: skip
    """Write what was asked for.

    Args:
        steps: names, the plans with the numbers that the command's table has, and how each is simulated. pairs: of the
            same strategies in the same order, where they were measured.

    Raises AutoparError ``unwritable-file``, ``missing-package``.
    """
    from autopar.plans import first_of
    from autopar.report.page import Strategy, page
    from autopar.report.perfetto import trace_of

    if args.trace:
        found = [(name, step) for name, _, step in steps if step is not None]
        _write(args.trace, json.dumps(trace_of(found)))
        screen.say(f"{args.trace}: open it at ui.perfetto.dev or chrome://tracing")
    if args.html:
        from autopar.models import load

        loaded = load(args.model)
        loaded.model.train()
        measured = [p.measured for p in pairs] or [None] * len(steps)
        near = [Strategy(n, p, s, m) for (n, p, s), m in zip(steps, measured, strict=True)]
        with screen.working(f"drawing {args.html}"):
            best = steps[first_of([p for _, p, _ in steps])]
            text = page(args.model, _about(loaded, best[1]), near, layers_of(loaded, best[0], best[1]), front)
        _write(args.html, text)
        screen.say(f"{args.html}: one page, open it in a browser")


def _about(loaded: "LoadedModel", plan: "Plan") -> str:
    """What all strategies of a page are for: the model, the devices and the rows of a step."""
    space = plan.found.question.space
    rows = f"{space.batch} rows" + (f" of {space.positions} positions" if space.positions > 1 else "")
    title = loaded.description.partition(": ")[2].replace(", on the meta device", "")
    return f"{title} on {plan.ranks} devices ({plan.hardware.name}); a step of {rows}"


def layers_of(loaded: "LoadedModel", name: str, plan: "Plan") -> "Layers":
    """Pictures of the layers of a plan, lowered for its mesh without stages; why there are none where it is refused."""
    from autopar.cli import _lower
    from autopar.report.blocks import pictures
    from autopar.report.page import Layers

    sizes = {a: plan.option.sizes[a] for a in plan.option.order if a != "pp" and plan.option.sizes[a] > 1}
    mesh = ",".join(f"{a}={n}" for a, n in sizes.items()) or "dp=1"
    fields = {"sequence_parallel": True} if plan.option.sequence else {}
    fields |= {"context_parallel": plan.option.context} if plan.option.context else {}  # type: ignore[dict-item]
    try:
        kwargs = loaded.kwargs(plan.option.rows, _length(plan))
        program = _lower.lower(loaded.model, kwargs, mesh, fields, after="reshard", loss_only=True)
    except AutoparError as error:
        return Layers(f"{name} on {mesh} is not drawn: {error}")
    text = (
        f"{name} on {mesh}: ops from top to bottom, views left out. A colour is an axis that shards the result; a "
        "dashed edge is a partial sum; yellow is a collective."
    )
    return Layers(text, pictures(program))


def _length(plan: "Plan") -> int:
    return max(EXAMPLE, 4 * plan.option.sizes["cp"] * plan.option.sizes["tp"])


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AutoparError(
            "unwritable-file", f"{path}: {error.strerror}", "name a file in a folder that exists"
        ) from None
