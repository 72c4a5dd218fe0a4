"""Models on a context axis equal the unsharded ones in double precision, on every rank, gradients included."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.models import load
from tests.context.models import (
    Attend,
    Biased,
    Convolved,
    Cross,
    Documents,
    Extremes,
    Pooled,
    Shifted,
    Sink,
    Slopes,
    Span,
    Turned,
    Weighed,
    Window,
    Written,
    rows,
)


def squares(out: Tensor) -> Tensor:
    return out.square().sum()


def keep(length: int = 16) -> Tensor:
    """Padding on the left of one row and on the right of the other."""
    kept = torch.ones(2, length, dtype=torch.bool)
    kept[0, :5], kept[1, length - 4 :] = False, False
    return kept


BOTH = ("ring", "ulysses")
CASES: list[tuple[str, Any, tuple[Any, ...], str, tuple[str, ...]]] = [
    ("causal", Attend, (rows(),), "cp=2", BOTH),
    ("four", Attend, (rows(),), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("grouped", lambda: Attend(8, 2), (rows(),), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("one-key-head", lambda: Attend(4, 1), (rows(),), "cp=2,tp=2", BOTH),
    ("heads-over-tp", lambda: Attend(8, 4), (rows(),), "cp=2,tp=2", BOTH),
    ("uneven", Attend, (rows(13),), "cp=2", BOTH),
    ("whole", lambda: Attend(is_causal=False), (rows(13),), "cp=4", BOTH),
    ("documents", Documents, (rows(), torch.arange(16).repeat(2, 1) // 5), "cp=2", BOTH),
    ("window", Window, (rows(), keep(), torch.arange(16).repeat(2, 1) // 7), "cp=2", BOTH),
    ("near", lambda: Window(3, False), (rows(13), keep(13), torch.arange(13).repeat(2, 1) // 7), "cp=4", BOTH),
    ("learned-bias", Biased, (rows(),), "cp=2", BOTH),
    ("cross", Cross, (rows(), rows(9, seed=2)), "cp=2", BOTH),
    ("pooled", Pooled, (rows(),), "dp=2,cp=2", BOTH),
    ("extremes", lambda: Extremes("all"), (rows(), keep()), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("extremes-uneven", lambda: Extremes("all"), (rows(13), keep(13)), "dp=2,cp=2", BOTH),
    ("first-extremes", lambda: Extremes("first"), (rows(), keep()), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("first-extremes-uneven", lambda: Extremes("first"), (rows(13), keep(13)), "dp=2,cp=2", BOTH),
    ("places-of-extremes", lambda: Extremes("place"), (rows(13), keep(13)), "cp=4", BOTH),
    ("column", lambda: Weighed("column"), (rows(), keep()), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("column-uneven", lambda: Weighed("column"), (rows(13), keep(13)), "dp=2,cp=2", BOTH),
    ("row", lambda: Weighed("row"), (rows(), keep()), "cp=2", BOTH),
    ("row-uneven", lambda: Weighed("row"), (rows(13), keep(13)), "dp=2,cp=2", BOTH),
    ("query", lambda: Weighed("query"), (rows(13), keep(13)), "cp=4", BOTH),
    ("score-heads", lambda: Weighed("heads"), (rows(), keep()), "cp=2,tp=2", BOTH),
    ("log-weights", lambda: Weighed("log"), (rows(13), keep(13)), "cp=2", BOTH),
    ("soft-maximum", lambda: Weighed("sum"), (rows(13), keep(13)), "dp=2,cp=2", BOTH),
    ("one-tap", lambda: Convolved(1), (rows(),), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("one-tap-uneven", lambda: Convolved(1), (rows(13),), "dp=2,cp=2", BOTH),
    ("one-tap-grouped", lambda: Convolved(1, groups=4), (rows(13),), "cp=2,tp=2", ("ring",)),
    ("span", Span, (rows(), torch.tensor([5, 13])), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("where", Written, (rows(), keep()), "cp=2", BOTH),
    ("filled", lambda: Written("fill", -1e4), (rows(), keep()), "cp=2", ("ring",)),
    ("added", lambda: Written("add"), (rows(), keep()), "cp=2", ("ring",)),
    ("capped", lambda: Written(cap=2.0), (rows(), keep()), "cp=2", BOTH),
    ("sink", Sink, (rows(),), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("slopes", Slopes, (rows(), keep()), "cp=4", (*BOTH, "ring:2+ulysses:2")),
    ("slopes-and-heads", Slopes, (rows(), keep()), "cp=2,tp=2", BOTH),
    ("turned", Turned, (rows(),), "cp=2,tp=2", BOTH),
    ("grouped-sink", lambda: Sink(2), (rows(13),), "cp=2", BOTH),
]


@pytest.mark.parametrize(
    ("make", "args", "mesh", "kind"),
    [pytest.param(m, a, mesh, kind, id=f"{n}-{kind}") for n, m, a, mesh, kinds in CASES for kind in kinds],
)
def test_equals_the_unsharded_model(make: Any, args: tuple[Any, ...], mesh: str, kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = make()
    report = autopar.verify(model, mesh, args=args, loss=squares, strategy=f"context_parallel={kind}")
    assert report.ok and report.tolerance == 1e-10, str(report)


@pytest.mark.parametrize("kind", [*BOTH, "ring:2+ulysses:2"])
@pytest.mark.parametrize("form", ["next", "before", "both"])
def test_losses_of_a_part_of_the_positions(form: str, kind: str) -> None:
    """Labels shifted by cutting logits, also where each run of a rank would be cut into another number of pieces."""
    torch.manual_seed(0)
    labels = torch.randint(0, 7, (2, 16), generator=torch.Generator().manual_seed(3))
    labels[0, :9] = -100 if form != "before" else 3
    report = autopar.verify(Shifted(form), "cp=4", args=(rows(), labels), strategy=f"context_parallel={kind}")
    assert report.ok, str(report)


def test_losses_that_are_weighed_stay_cut() -> None:
    labels = torch.randint(0, 7, (2, 16), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    report = autopar.verify(Shifted("weighed"), "cp=2", args=(rows(), labels), strategy="context_parallel=ulysses")
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("family", "mesh", "strategy"),
    [
        ("llama", "dp=2,cp=2", ""),
        ("llama", "cp=4", "context_parallel=ring:2+ulysses:2"),
        ("llama", "cp=2,tp=2", "sequence_parallel"),
        ("llama", "dp=2,cp=2", "zero=3"),
        ("bert", "cp=2", "context_parallel=ring"),
        ("gpt2", "cp=2,tp=2", "context_parallel=ulysses"),
        ("t5", "cp=2", "context_parallel=ring"),
        ("deepseek", "cp=2", "context_parallel=ring"),
        ("deepseek", "cp=4", "context_parallel=ulysses"),
        ("gemma2", "cp=2", "context_parallel=ring"),
        ("gemma2", "cp=2", "context_parallel=ulysses"),
        ("bloom", "cp=2", "context_parallel=ring"),
        ("bloom", "cp=2,tp=2", "context_parallel=ulysses"),
    ],
    ids=lambda value: value or "-",
)
def test_families_are_exact(family: str, mesh: str, strategy: str) -> None:
    """Labels are shifted inside; rotary and learned positions, padding and relative biases follow the order."""
    loaded = load(f"hf:{family}-tiny", meta=False)
    model, kwargs = loaded.model.eval(), (loaded.padding or loaded.kwargs)(4, 16)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    report = autopar.verify(model, mesh, kwargs=kwargs, strategy=strategy)
    assert report.ok, str(report)
