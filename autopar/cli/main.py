"""The command line. Programs and tables go to stdout, everything else to stderr.

Exit status: 0 done, 1 refused or not equal, 2 wrong usage.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from autopar.cli.screen import Screen
from autopar.cli.welcome import welcome
from autopar.errors import AutoparError

COMMANDS = ("dump", "verify", "plan", "compare", "cost", "predict", "calibrate", "train")


def build(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of all commands, or of some: those of which nothing is asked are not loaded."""
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="Make an unmodified PyTorch model run on a device mesh, equal to the original.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in names:
        importlib.import_module(f"autopar.cli.{name}").add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Wrong usage raises SystemExit(2), as argparse does."""
    given, screen = list(sys.argv[1:] if argv is None else argv), Screen()
    parser = build(given[:1] if given and given[0] in COMMANDS else COMMANDS)
    if not given or given[0] in ("-h", "--help"):
        welcome(screen.out if given else screen.err, parser)
        if given:
            return 0
        raise SystemExit(2)
    args = parser.parse_args(given)
    run: Callable[[argparse.Namespace, Screen], int] = args.run
    try:
        return run(args, screen)
    except AutoparError as error:
        screen.refuse(error)
        return 1


def entry() -> None:
    """The ``autopar`` script."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has had enough: autopar dump ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
