"""``autopar dump``: print the program of one rank, or of any pass on the way."""

import argparse
from typing import Any

from autopar.cli import _lower
from autopar.cli.arguments import add_mesh, add_model
from autopar.cli.screen import Screen
from autopar.cost.hardware import load as profile
from autopar.ir.printer import FORMATS, print_program
from autopar.ir.program import Program
from autopar.models import load
from autopar.report.stages import step_of
from autopar.report.timeline import grid
from autopar.strategy import Strategy


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "dump",
        help="print the program",
        description="Lower MODEL for a mesh, without weights, and print the program.",
    )
    add_model(parser)
    add_mesh(parser)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--after", metavar="PASS", help="stop after this pass (trace: before any)")
    when.add_argument("--after-each", action="store_true", help="print the program after every pass")
    parser.add_argument("--format", choices=FORMATS, default="text", help="default text")
    parser.add_argument("--rank", type=int, metavar="N", help="the sizes of this rank (default: global sizes)")
    parser.add_argument("--block", metavar="NAME", help="one block alone, by its name or its number from 0")
    parser.add_argument("--eval", action="store_true", help="the graph of eval mode (default: training)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Print the program; exit status 0."""

    def show(name: str, program: Program) -> None:
        screen.write(("" if first.pop() else "\n") + _comment(name, args.format))
        screen.write(_printed(program, args))
        first.append(False)

    first = [True]
    with screen.working(f"lowering {args.model}"):
        loaded = load(args.model)
        loaded.model.train(not args.eval)
        make = loaded.padding if args.padding and loaded.padding else loaded.kwargs
        length = args.seq or loaded.sequence
        asked = _lower.settled(
            loaded.model, make(args.batch, length), args.mesh, args.strategy, args.batch, devices=args.devices,
            passes=args.passes,
        )  # fmt: skip
        program = _lower.lower(
            loaded.model,
            make(asked.own, length),
            asked.mesh,
            asked.fields,
            passes=args.passes,
            after=args.after,
            rank=args.rank,
            on_pass=show if args.after_each else None,
        )
    screen.say(loaded.description)
    if asked.summary:
        screen.say(asked.summary)
    if not args.after_each:
        screen.write(_printed(program, args))
    if program.stages is not None and args.format == "text" and args.block is None:
        hardware = profile(str(asked.fields.get("hardware", Strategy.hardware)))
        screen.write("\n" + grid(step_of(program, hardware)).plain + "\n")
    return 0


def _comment(name: str, format: str) -> str:
    mark = {"text": "====", "python": "#", "dot": "//"}.get(format)
    return f"{mark} after {name}\n" if mark else ""


def _printed(program: Program, args: argparse.Namespace) -> str:
    numbered = dict(enumerate(program.blocks))
    block = args.block and numbered.get(int(args.block) if args.block.isdigit() else -1, args.block)
    return print_program(program, format=args.format, rank=args.rank, block=block)
