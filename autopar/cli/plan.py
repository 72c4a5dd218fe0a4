"""``autopar plan``: the fastest strategies for a model on a cluster."""

import argparse
from typing import Any

from autopar.cli.arguments import add_model, positive, whole
from autopar.cli.pictures import add_pictures, draw
from autopar.cli.plans import plans_text
from autopar.cli.screen import Screen
from autopar.learned import Named, plan_named
from autopar.ranking import LOWERED, cluster_of


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
    parser.add_argument(
        "--lower", type=whole, metavar="N",
        help=f"lower the first N plans by the passes and rank them by their own programs, which takes a trace (default "
        f"0 of hf:, {LOWERED} of module:callable)",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="trace the model although its closed forms are kept")
    add_pictures(parser)
    parser.add_argument("--json", action="store_true", help="the plans as json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Print the plans; exit status 1 where nothing fits."""
    machine = cluster_of(args.cluster)
    with screen.working(f"planning {args.model} on {args.cluster}"):
        model = Named(args.model, args.precision, args.seq, args.fresh, screen.say)
        known = model.known(machine)
        plans = plan_named(
            model, known, machine, batch=args.batch, axes=tuple(args.axes.split(",")),
            count=max(args.top, args.explain or 1), lower=args.lower,
        )  # fmt: skip
    length = f"sequence {known.positions}; " if args.seq or known.sequential else ""
    screen.say(f"{args.model}: {known.title}; {length}{args.cluster}, {args.precision}")
    if not plans:
        screen.say(plans.hint)
        return 1
    for note in plans.said:
        screen.say(note)
    if args.json:
        screen.write(plans_text([(str(i), p) for i, p in enumerate(plans, 1)], "json"))
    elif args.explain:
        for grid in plans[min(args.explain, len(plans)) - 1].tables():
            screen.out.print(grid)
    else:
        screen.out.print(plans.table(front=args.front))
    if args.html or args.trace:
        from autopar.plans import rehearsed

        shown = [(f"plan {i}", p) for i, p in enumerate(plans[: args.top], 1)]
        steps = [(n, p, rehearsed(p)) for n, p in shown]
        draw(args, screen, steps, front=plans.front)
    return 0
