"""What a user may choose, and the pipeline that it stands for."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf
from numbers import Integral, Real
from typing import Any

from autopar.errors import AutoparError

LATER = ("approximate_microbatches",)


@dataclass(frozen=True)
class Kind:
    """What a field may be: in words, from text (ValueError or KeyError where it cannot be), and which values."""

    words: str
    read: Callable[[str], Any]
    holds: Callable[[Any], bool]


def _whole(least: int, most: int | None = None) -> Kind:
    words = f"a whole number, at least {least}" if most is None else f"a whole number from {least} to {most}"
    holds = lambda v: least <= v and (most is None or v <= most)  # noqa: E731
    return Kind(words, int, lambda v: isinstance(v, Integral) and not isinstance(v, bool) and holds(v))


def _one_of(*known: str) -> Kind:
    return Kind(f"one of {', '.join(known)}", str, lambda v: isinstance(v, str) and v in known)


def _flag(text: str) -> bool:
    return {"": True, "true": True, "1": True, "false": False, "0": False}[text.lower()]


def _factor(text: str) -> float:
    return int(text) if text.isdigit() else float(text)


FLAG = Kind("true or false", _flag, lambda v: v in (False, True))
TEXT = Kind("text", str, lambda v: isinstance(v, str))
FACTOR = Kind(
    "a positive number", _factor, lambda v: isinstance(v, Real) and not isinstance(v, bool) and 0 < float(v) < inf
)
NAMES = Kind(
    "names of modules, as text layers.4+layers.8", lambda text: tuple(text.split("+")),
    lambda v: isinstance(v, (tuple, list)) and all(isinstance(n, str) and n for n in v),
)  # fmt: skip
KINDS = {
    "sequence_parallel": FLAG, "strict": FLAG, "passes": TEXT, "hardware": TEXT, "microbatches": _whole(1),
    "microbatch_rows": _whole(1), "zero": _whole(0, 3), "zero_shard_size": _whole(0), "prefetch": _whole(0),
    "approximate_microbatches": FLAG, "virtual_stages": _whole(1), "stages": NAMES, "outputs": _one_of("every", "last"),
    "schedule": _one_of("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"), "context_parallel": TEXT,
    "recompute": _one_of("none", "selective", "full"), "precision": _one_of("fp32", "bf16"),
    "offload": _one_of("none", "cpu"), "expert_capacity": FACTOR, "expert_chunks": _whole(1),
}  # fmt: skip


@dataclass(frozen=True)
class Strategy:
    """How to parallelize. Every field has a default that works.

    Args:
        sequence_parallel: shard positions of norms, residuals and dropouts over ``tp``.
        strict: an op without a rule is an error instead of a warning.
        passes: pipeline text, overriding all other fields.
        microbatches: parts of a rank's rows that a training step runs one after the other, gradients accumulating. By
            default one; with a pipeline as many as divide the rows, up to four for each stage.
        microbatch_rows: rows of a microbatch at most, instead of their number: as few microbatches as that allows.
        schedule: in which order a pipeline runs them: "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv" or
            "dualpipev". By default 1f1b, or gpipe where there are fewer microbatches than stages.
        virtual_stages: stages that each rank of a pipeline runs; by default those that the schedule needs.
        stages: modules with which the stages of a pipeline begin (the first may be left out); by default they take
            equally long. As text: ``layers.4+layers.8``.
        outputs: which ranks of a pipeline get the model's output: "every", or "last", the ones with the last stage.
        hardware: profile whose figures price the choices: "h100", "a100-80g", "cpu", ...
        zero: ZeRO stage over the data axes. From 1 on each data rank keeps 1/N of parameters, gradients and optimizer
            state. 1 reduces gradients once a step, 2 with each microbatch, 3 also gathers parameters unit by unit.
        zero_shard_size: data ranks that share out one copy of the parameters; all where None.
        prefetch: units that are gathered ahead of the one that runs; the engine's own choice where None.
        context_parallel: how attention runs on ``cp``: "ring", "ulysses", "ring:2+ulysses:4" (their product is the
            axis), or the cheapest of them where None.
        recompute: what the backward computes again instead of keeping it: "none", "selective" or "full".
        precision: "fp32" computes in the parameters' own dtypes, "bf16" in bfloat16 what is held in float32.
        Parameters,
            their gradients and the sums over data ranks stay in float32.
        expert_capacity: where experts are on other ranks, rows that a rank sends to each expert, as a multiple of their
            mean on the rank with the most tokens: shapes are static, which ``compile`` wants, and choices beyond are
            dropped. None drops nothing.
        expert_chunks: parts in which tokens travel to experts on other ranks: while one travels, another is computed,
            and the first travels while shared experts run. None: everything waits for its rows.
        offload: "cpu" keeps parameters, gradients and optimizer state in host memory.

    Fields of techniques that are not there yet are refused when they are set.
    """

    sequence_parallel: bool = False
    strict: bool = False
    passes: str | None = None
    hardware: str = "h100"
    microbatches: int | None = None
    microbatch_rows: int | None = None
    zero: int = 0
    zero_shard_size: int | None = None
    prefetch: int | None = None
    approximate_microbatches: bool = False
    schedule: str | None = None
    virtual_stages: int | None = None
    stages: tuple[str, ...] | None = None
    outputs: str = "every"
    context_parallel: str | None = None
    recompute: str = "none"
    precision: str = "fp32"
    offload: str | None = None
    expert_capacity: float | None = None
    expert_chunks: int | None = None

    def __post_init__(self) -> None:
        if self.microbatches is not None and self.microbatch_rows is not None:
            raise AutoparError("bad-strategy", "microbatches and microbatch_rows are both given", "give one of them")
        if isinstance(self.stages, str):
            object.__setattr__(self, "stages", NAMES.read(self.stages))
        later = {f.name: f.default for f in fields(self) if f.name in LATER}
        for name, default in later.items():
            if getattr(self, name) != default:
                raise AutoparError(
                    "unsupported-strategy",
                    f"Strategy({name}={getattr(self, name)!r}): this version does not have it",
                    f"leave {name} at {default!r}",
                )
        for f in fields(self):
            value = getattr(self, f.name)
            if not (value is None and f.default is None) and not KINDS[f.name].holds(value):
                raise _wrong(f.name, repr(value))

    @property
    def pipeline(self) -> str:
        """The passes, as text."""
        return self.pipeline_on(False)

    def pipeline_on(self, staged: bool) -> str:
        """The passes, as text, for a mesh with (``staged``) or without pipeline stages."""
        if self.passes is not None:
            return self.passes
        tensor = "tensor-parallel{sequence}" if self.sequence_parallel else "tensor-parallel"
        kind = "" if self.context_parallel in (None, "auto") else f"{{kind={self.context_parallel}}}"
        axes = ["data-parallel", self._experts, tensor, f"context-parallel{kind}"]
        words = [*axes, "reshard", *self._stages(staged), "localize", *self._engine]
        return ",".join(words)

    def _stages(self, staged: bool) -> list[str]:
        """The pass that cuts stages; also where the mesh has none but the user speaks of them, which it refuses."""
        given = {"schedule": self.schedule, "virtual": self.virtual_stages, "stages": "+".join(self.stages or ())}
        options = " ".join(f"{k}={v}" for k, v in given.items() if v)
        return [f"pipeline{{{options}}}" if options else "pipeline"] if options or staged else []

    @property
    def _experts(self) -> str:
        capacity = None if self.expert_capacity is None else float(self.expert_capacity)
        given = {"capacity": capacity, "chunks": self.expert_chunks}
        options = " ".join(f"{k}={v}" for k, v in given.items() if v is not None)
        return f"expert-parallel{{{options}}}" if options else "expert-parallel"

    @property
    def _engine(self) -> list[str]:
        """The passes behind ``localize``."""
        given = {
            "stage": self.zero, "shard": self.zero_shard_size, "prefetch": self.prefetch, "offload": self.offload,
            "precision": None if self.precision == "fp32" else self.precision,
        }  # fmt: skip
        options = " ".join(f"{k}={v}" for k, v in given.items() if v not in (0, None))
        recompute = [] if self.recompute == "none" else [f"recompute{{policy={self.recompute}}}"]
        return [f"zero{{{options}}}" if options else "zero", *recompute] if options or recompute else []

    def __str__(self) -> str:
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        changed = [f"{n}={'+'.join(v) if isinstance(v, tuple) else v}" for n, v in found.items()]
        return ",".join(changed) or "default"

    @staticmethod
    def of(strategy: "Strategy | str | None") -> "Strategy":
        """From itself, from ``"field=value,..."`` text, or the default. Raises AutoparError ``bad-strategy``."""
        return strategy if isinstance(strategy, Strategy) else Strategy(**written(strategy or ""))


def written(text: str) -> dict[str, Any]:
    """The fields that ``"field=value,..."`` names, at their defaults or not. Raises AutoparError ``bad-strategy``."""
    known = {f.name: f for f in fields(Strategy)}
    given: dict[str, Any] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        name, _, value = word.partition("=")
        if name == "default":
            continue
        if name not in known:
            raise AutoparError("bad-strategy", f"Strategy has no field {name!r}", f"fields: {', '.join(known)}")
        if name in given:
            raise AutoparError("bad-strategy", f"{name} is written twice: {text}", "write it once")
        try:
            given[name] = KINDS[name].read(value)
        except (KeyError, ValueError):
            raise _wrong(name, repr(value)) from None
    return given


def _wrong(name: str, value: str) -> AutoparError:
    rest = ", or left out" if Strategy.__dataclass_fields__[name].default is None else ""
    return AutoparError("bad-strategy", f"{name} is {value}", f"{name}: {KINDS[name].words}{rest}")
