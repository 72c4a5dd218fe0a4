"""What a user may choose, and the pipeline that it stands for."""

from dataclasses import dataclass, fields
from typing import Any

from autopar.errors import AutoparError


@dataclass(frozen=True)
class Strategy:
    """How to parallelize. Every field has a default that works.

    Args:
        sequence_parallel: shard positions of norms, residuals and dropouts over ``tp``.
        strict: an op without a rule is an error instead of a warning.
        passes: pipeline text, overriding all other fields.
        microbatches: parts of a rank's rows that a training step runs one after the other, gradients accumulating.
        hardware: profile whose figures price the choices: "h100", "a100-80g", "cpu", ...

    Fields of techniques that are not there yet are refused when they are set.
    """

    sequence_parallel: bool = False
    strict: bool = False
    passes: str | None = None
    hardware: str = "h100"
    microbatches: int = 1
    zero: int = 0
    zero_shard_size: int | None = None
    prefetch: int | None = None
    approximate_microbatches: bool = False
    schedule: str | None = None
    virtual_stages: int = 1
    stages: tuple[str, ...] | None = None
    context_parallel: str | None = None
    recompute: str = "none"
    precision: str = "fp32"
    offload: str | None = None
    expert_capacity: float | None = None

    def __post_init__(self) -> None:
        later = {f.name: f.default for f in fields(self)[5:]}
        for name, default in later.items():
            if getattr(self, name) != default:
                raise AutoparError(
                    "unsupported-strategy",
                    f"Strategy({name}={getattr(self, name)!r}): this version does not have it",
                    f"leave {name} at {default!r}",
                )

    @property
    def pipeline(self) -> str:
        """The passes, as text."""
        if self.passes is not None:
            return self.passes
        tensor = "tensor-parallel{sequence}" if self.sequence_parallel else "tensor-parallel"
        return f"data-parallel,{tensor},reshard,localize"

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed) or "default"

    @staticmethod
    def of(strategy: "Strategy | str | None") -> "Strategy":
        """A strategy from itself, from ``"field=value,..."`` text, or the default. Raises AutoparError ``bad-strategy``."""
        if isinstance(strategy, Strategy):
            return strategy
        known = {f.name: f for f in fields(Strategy)}
        given: dict[str, Any] = {}
        for word in filter(None, (w.strip() for w in (strategy or "").split(","))):
            name, _, value = word.partition("=")
            if name == "default":
                continue
            if name not in known:
                raise AutoparError("bad-strategy", f"Strategy has no field {name!r}", f"fields: {', '.join(known)}")
            given[name] = _value(value, known[name].default)
        return Strategy(**given)


def _value(text: str, default: object) -> object:
    if isinstance(default, bool):
        return text.lower() in ("", "true", "1", "yes")
    return int(text) if isinstance(default, int) else (int(text) if text.isdigit() else text)
