"""Exceptions that users see: each has a slug, a place, and a fix."""


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
