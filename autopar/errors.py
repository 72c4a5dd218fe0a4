"""Exceptions and warnings that users see: each error has a slug, a place, and a fix."""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterable


class AutoparError(Exception):
    """A refusal with a stable slug.

    Args:
        slug: kebab-case identifier that tests and users can match.
        message: what is wrong, beginning with where (module path, dim, axis, sizes).
        fix: what to change, in one line.
    """

    def __init__(self, slug: str, message: str, fix: str | None = None) -> None:
        self.slug = slug
        self.message = message
        self.fix = fix
        super().__init__(f"{message} [{slug}]" + (f"\n  fix: {fix}" if fix else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None]]:
        return type(self), (self.slug, self.message, self.fix)


class AutoparWarning(UserWarning):
    """A fallback that is right but slower, or a construct that was replaced; said once."""


def tell(messages: Iterable[str]) -> None:
    """Warn the user of each message once, at the line that called into the package.

    Processes that ``torchrun`` started on one machine say the same: the first of them speaks.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    package = os.path.dirname(__file__) + os.sep
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1))]
    caller = max((i + 1 for i, file in enumerate(files) if file.startswith(package)), default=0)
    while files[caller] == contextlib.__file__:  # of a function that is wrapped in a context
        caller += 1
    for message in dict.fromkeys(messages):
        warnings.warn(message, AutoparWarning, stacklevel=caller + 2)
