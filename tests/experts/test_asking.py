"""What Python may ask while a layer of experts runs: of the choice of experts whatever has one result, else nothing."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.trace import trace
from autopar.trace.routed import Layer
from tests.experts import asking
from tests.experts.lists import Hit
from tests.experts.models import WIDTH, states
from tests.experts.test_lists import nodes, traced

MORE = [
    asking.Steps, asking.Flag, asking.Temperature, asking.Scaled, asking.Listing, asking.Equal, asking.Capacity,
    asking.Sure, asking.Auxiliary, asking.Early, asking.Threshold, asking.Lucky,
]  # fmt: skip
ANSWERS = [asking.FirstToken, asking.FirstNumber, asking.Crowded, asking.Forgotten, asking.Another]
KNOWN = [
    asking.Any, asking.Unique, asking.Greater, asking.ByToken, asking.Everyone, asking.Biased,
    asking.WholeAtOnce, asking.Clipped,
]  # fmt: skip


@pytest.mark.parametrize("kind", [*MORE, *ANSWERS], ids=lambda k: k.__name__)
def test_what_follows_from_more_than_the_choice_of_experts_is_refused(kind: Any) -> None:
    with pytest.raises(AutoparError) as caught:
        traced(kind().eval())
    assert caught.value.slug == "data-dependent-control-flow"
    assert "asking.py:" in str(caught.value) or "lists.py:" in str(caught.value)


WHY = [
    (asking.Temperature, "the model / Temperature.forward: asking.py:", "more than which experts are chosen"),
    (asking.Threshold, "the model / Threshold.dispatch: asking.py:", "how many rows there are"),
    (asking.Broken, "the model / Broken.dispatch: asking.py:", "it raises ZeroDivisionError"),
    (asking.Forgotten, "", "what is computed depends on which experts are chosen"),
]


@pytest.mark.parametrize(("kind", "where", "why"), WHY, ids=lambda x: getattr(x, "__name__", None))
def test_a_refusal_says_why_no_experts_were_recognized(kind: Any, where: str, why: str) -> None:
    with pytest.raises(AutoparError) as caught:
        traced(nn.Sequential(kind()).eval())
    assert caught.value.slug == "data-dependent-control-flow"
    said = caught.value.message.partition("; no experts were recognized in 0: ")[2]
    assert said.startswith(where) and why in said, caught.value


def test_faults_of_the_analysis_are_not_taken_for_the_layer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(Layer, "understand", fails)
    with pytest.raises(AutoparError, match="KeyError"):
        traced(Hit().eval())


def test_all_experts_are_seen_however_few_tokens() -> None:
    model = asking.Many().eval()
    x = torch.randn(1, 1, WIDTH)
    made = trace(model, (x,), {}, mesh=Mesh.parse("dp=1"), train=False)
    assert len(nodes(made)) == 1


def test_layers_that_read_numbers_of_their_own_are_understood_one_by_one() -> None:
    model = asking.Numbered().eval()
    made = traced(model)
    assert len(nodes(made)) == 4
    values = {**dict(model.named_parameters()), **made.constants}
    with torch.no_grad():
        got, want = evaluate(made.program, values, [states()])[0], model(states())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_weights_made_whole_are_not_taken_for_those_they_are_made_of() -> None:
    with pytest.raises(AutoparError) as caught:
        traced(asking.Whole().eval())
    assert caught.value.slug == "data-dependent-control-flow"


@pytest.mark.parametrize("kind", KNOWN, ids=lambda k: k.__name__)
def test_questions_with_one_result_are_let_pass(kind: Any) -> None:
    model = kind().eval()
    made = traced(model)
    assert len(nodes(made)) == 1
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), **made.constants}
    with torch.no_grad():
        got, want = evaluate(made.program, values, [states()])[0], model(states())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [asking.Array, asking.Counting])
def test_arrays_and_tensors_that_are_no_buffers_are_left_to_export(kind: Any) -> None:
    with pytest.raises(AutoparError) as caught:
        traced(kind().eval())
    assert caught.value.slug == "trace-failed"
