"""What Python may ask while a layer of experts runs: of the choice of experts whatever has one result, else nothing."""

from typing import Any

import pytest
import torch

from autopar.errors import AutoparError
from autopar.ir.evaluate import evaluate
from tests.experts import asking
from tests.experts.models import states
from tests.experts.test_lists import nodes, traced

MORE = [
    asking.Steps, asking.Flag, asking.Temperature, asking.Scaled, asking.Listing, asking.Equal, asking.Capacity,
    asking.Sure, asking.Auxiliary, asking.Early, asking.Threshold, asking.Lucky,
]  # fmt: skip
ANSWERS = [asking.FirstToken, asking.FirstNumber, asking.Crowded, asking.Forgotten, asking.Another]
KNOWN = [asking.Any, asking.Unique, asking.Greater, asking.ByToken, asking.Everyone, asking.Biased]


@pytest.mark.parametrize("kind", [*MORE, *ANSWERS], ids=lambda k: k.__name__)
def test_what_follows_from_more_than_the_choice_of_experts_is_refused(kind: Any) -> None:
    with pytest.raises(AutoparError) as caught:
        traced(kind().eval())
    assert caught.value.slug == "data-dependent-control-flow"
    assert "asking.py:" in str(caught.value) or "lists.py:" in str(caught.value)


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
