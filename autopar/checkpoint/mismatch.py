"""What does not fit between a module and saved tensors, as one error."""

from dataclasses import dataclass, field

from autopar.errors import AutoparError

LISTED = 20


@dataclass
class Mismatch:
    """Names with their shapes, sorted by what is wrong."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)

    def refuse(self, where: str) -> None:
        """Raises AutoparError ``state-dict-mismatch`` where there is anything."""
        parts = []
        for title in ("missing", "unexpected", "misshaped"):
            names = getattr(self, title)
            if names:
                more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
                parts.append(f"{title}: {', '.join(names[:LISTED])}{more}")
        if parts:
            fix = "load it into the model that it was saved from"
            raise AutoparError("state-dict-mismatch", f"{where}: " + "; ".join(parts), fix)
