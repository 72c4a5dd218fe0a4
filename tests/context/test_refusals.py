"""What mixes positions in a way that a context axis cannot do is refused by name."""

from typing import Any

import pytest
from torch import nn

from autopar.compile import lower
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.strategy import Strategy
from tests.context.models import Attend, Columns, Convolved, Recurrent, rows


def refused(model: nn.Module, args: tuple[Any, ...], mesh: str, strategy: str) -> AutoparError:
    with pytest.raises(AutoparError) as caught:
        lower(model, args, {}, Mesh.parse(mesh), strategy, after="context-parallel", loss=lambda out: out.sum())
    return caught.value


CASES: list[tuple[str, Any, tuple[Any, ...], str, str, list[str]]] = [
    ("ring-dropout", lambda: Attend(dropout_p=0.1), (rows(),), "cp=2", "context_parallel=ring", ["dropout_p=0.1"]),
    ("short-sequence", Attend, (rows(3),), "cp=4", "context_parallel=ring", ["3", "cp=4"]),
    ("indivisible-sequence", Attend, (rows(18),), "cp=4", "context_parallel=ring:2+ulysses:2", ["18", "24"]),
    ("ulysses-heads", lambda: Attend(6, 6), (rows(),), "cp=4", "context_parallel=ulysses", ["6 heads", "1, 2, 3, 6"]),
    ("whole-sequence", Convolved, (rows(),), "cp=2", "", ["conv", "conv1d"]),
    ("whole-sequence", lambda: Convolved(1, stride=2), (rows(),), "cp=2", "", ["conv", "conv1d"]),
    ("sequence-scan", Recurrent, (rows(),), "cp=2", "", ["recurrence", "16"]),
    ("whole-sequence", Columns, (rows(),), "cp=2", "", ["matmul needs", "not recognized"]),
]


@pytest.mark.parametrize(("slug", "make", "args", "mesh", "strategy", "words"), CASES)
def test_refused(slug: str, make: Any, args: tuple[Any, ...], mesh: str, strategy: str, words: list[str]) -> None:
    error = refused(make(), args, mesh, strategy)
    assert error.slug == slug, error
    for word in words:
        assert word in str(error), error


@pytest.mark.parametrize("kind", ["rings", "ring:2", "ring:a+ulysses:b"])
def test_a_kind_that_is_none(kind: str) -> None:
    with pytest.raises(AutoparError, match="context_parallel") as caught:
        lower(Attend(), (rows(),), {}, Mesh.parse("cp=2"), Strategy(context_parallel=kind))
    assert caught.value.slug == "bad-strategy"


def test_a_split_whose_product_is_another() -> None:
    assert refused(Attend(), (rows(),), "cp=4", "context_parallel=ring:3+ulysses:2").slug == "bad-strategy"


def test_dropout_of_probabilities_takes_ulysses_by_itself() -> None:
    program = lower(Attend(dropout_p=0.1), (rows(),), {}, Mesh.parse("cp=2"), after="context-parallel")
    targets = {str(getattr(n.target, "__name__", "")) for _, g in program.graphs() for n in g.nodes}
    assert "attention" in targets and "ring_attention" not in targets
