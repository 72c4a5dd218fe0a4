"""What people read while a command works: progress, remarks and refusals, on stderr."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from autopar.errors import AutoparError

WIDE = 200  # columns of a table that goes to a file or a pipe


class Screen:
    """The two ends of a command: ``out`` for results on stdout, everything else on stderr, unless ``quiet``."""

    def __init__(self, quiet: bool = False) -> None:
        width = None if sys.stdout.isatty() else WIDE
        self.out = Console(file=sys.stdout, soft_wrap=True, highlight=False, width=width)
        self.err = Console(file=sys.stderr, highlight=False, soft_wrap=True, quiet=quiet)

    def write(self, text: str) -> None:
        """Result text, as it is."""
        sys.stdout.write(text)

    def say(self, text: str) -> None:
        """A remark."""
        self.err.print(escape(text), style="dim")

    def refuse(self, error: AutoparError) -> None:
        """A refusal with its slug and its fix."""
        self.err.print(f"[bold red]error[/]: {escape(str(error))}")

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show that ``text`` is going on; warnings of ours are shown as remarks, those of other libraries are not."""
        with warnings.catch_warnings(record=True) as caught, self.err.status(escape(text)):
            warnings.simplefilter("default")
            yield
        for warning in caught:
            if warning.category.__module__.startswith("autopar"):
                self.say(f"warning: {warning.message}")
