"""``autopar calibrate``: measure this machine and write its hardware profile."""

import argparse
from pathlib import Path
from typing import Any

from autopar.cli.arguments import positive
from autopar.cli.screen import Screen


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine as a hardware profile",
        description="Measure matmuls, attention, memory and gloo collectives of the CPU, one thread a process.",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="toml file to write (default: stdout)")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="processes of a collective (default 2)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Write the profile; exit status 0."""
    from autopar.calibrate import measure, to_toml

    with screen.working("measuring"):
        text = to_toml(measure(max(2, args.ranks)), "measured by autopar calibrate, one thread a process")
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        screen.write(text)
    return 0
