"""``autopar plan``: the fastest strategies for a model on a cluster."""

import argparse
from typing import Any

from autopar.cli.arguments import add_model, positive
from autopar.cli.models import load
from autopar.cli.pictures import add_pictures, draw
from autopar.cli.plans import plans_text
from autopar.cli.screen import Screen


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "plan",
        help="the fastest strategies that fit a cluster",
        description="Search all degrees, engines and schedules for MODEL on CLUSTER, without weights and devices.",
    )
    add_model(parser)
    parser.add_argument("cluster", metavar="CLUSTER", help="hardware and number of devices, as h100x64")
    parser.add_argument("--batch", type=positive, metavar="N", help="rows of the global batch (default: 4 a device)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="default bf16")
    parser.add_argument("--axes", metavar="NAMES", default="pp,dp,ep,cp,tp", help="mesh axes to use (default all)")
    parser.add_argument("--top", type=positive, metavar="N", default=8, help="plans to show (default 8)")
    parser.add_argument(
        "--explain", type=positive, metavar="N", help="plan N in full, and why its neighbours are worse"
    )
    parser.add_argument("--front", action="store_true", help="the Pareto front of time and memory instead")
    add_pictures(parser)
    parser.add_argument("--json", action="store_true", help="the plans as json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Print the plans; exit status 1 where nothing fits."""
    from autopar.planner import plan
    from autopar.rehearsed import rehearsed

    with screen.working(f"planning {args.model} on {args.cluster}"):
        loaded = load(args.model)
        loaded.model.train()
        sequence = args.seq or loaded.sequence
        plans = plan(
            loaded.model, args.cluster, (), loaded.kwargs(2, sequence), batch=args.batch, sequence=args.seq,
            precision=args.precision, axes=tuple(args.axes.split(",")), count=max(args.top, args.explain or 1),
        )  # fmt: skip
    screen.say(f"{loaded.description}; sequence {sequence}; {args.cluster}, {args.precision}")
    if not plans:
        screen.say(plans.hint)
        return 1
    for note in plans.notes:
        screen.say(note)
    if args.json:
        screen.write(plans_text([(str(i), p) for i, p in enumerate(plans, 1)], "json"))
    elif args.explain:
        for grid in plans[min(args.explain, len(plans)) - 1].tables():
            screen.out.print(grid)
    else:
        screen.out.print(plans.table(front=args.front))
    if args.html or args.trace:
        shown = [(f"plan {i}", p) for i, p in enumerate(plans[: args.top], 1)]
        steps = [(n, p, rehearsed(p)) for n, p in shown]
        draw(args, screen, loaded, steps, front=plans.front)
    return 0
