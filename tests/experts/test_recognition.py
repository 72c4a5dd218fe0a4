"""Which modules become one op, and that the op computes what they do."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.evaluate import evaluate
from autopar.ir.grouped import body_text
from autopar.ir.mesh import Mesh
from autopar.trace import registered, trace
from autopar.trace.tracing import Traced
from tests.experts.models import (
    EXPERTS,
    WIDTH,
    Centred,
    Experts,
    Loop,
    Moe,
    PassThrough,
    adapted,
    batch,
    deepseek,
    gpt_oss,
    qwen,
    states,
)


@pytest.fixture
def registration() -> Iterator[None]:
    """Loops are known while the test lasts."""
    autopar.register_experts(Loop, adapted)
    yield
    registered._ADAPTERS.clear()


def traced(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> Traced:
    return trace(model, args, kwargs, mesh=Mesh.parse("dp=1"), train=model.training)


def nodes(made: Traced) -> list[fx.Node]:
    return [n for _, g in made.program.graphs() for n in g.nodes if n.target is ops.experts]


def same(model: nn.Module, made: Traced, inputs: list[Tensor], want: Tensor) -> None:
    """The program gives what the model gives."""
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), **made.constants}
    got = next(x for x in evaluate(made.program, values, inputs) if x.shape == want.shape)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [deepseek, qwen, gpt_oss], ids=lambda m: m.__name__)
def test_families_of_transformers(make) -> None:
    model, inputs = make().eval(), batch()
    made = traced(model, input_ids=inputs["input_ids"])
    found = nodes(made)
    assert len({n.args[4] for n in found}) == 1 and found
    want = model(input_ids=inputs["input_ids"], use_cache=False).logits
    same(model, made, [inputs["input_ids"]], want)


def test_whatever_their_implementation() -> None:
    bodies = set()
    for kind in ("eager", "batched_mm", "grouped_mm"):
        model = qwen().eval()
        model.set_experts_implementation(kind)  # type: ignore[operator]
        bodies |= {n.args[4] for n in nodes(traced(model, input_ids=batch()["input_ids"]))}
    assert [body_text(b) for b in bodies] == ["linear-split_with_sizes-silu-mul-linear"]


def test_as_many_experts_as_the_largest_models_have() -> None:
    model = deepseek(n_routed_experts=256, n_group=8, topk_group=4, num_experts_per_tok=8)
    assert len(nodes(traced(model, input_ids=batch()["input_ids"]))) == 1


def test_a_module_of_one_s_own() -> None:
    model, x = Moe().eval(), states()
    made = traced(model, x)
    assert [body_text(n.args[4]) for n in nodes(made)] == ["matmul-gelu-each-mul-matmul"]
    same(model, made, [x], model(x))


@pytest.mark.parametrize("kind", [PassThrough, Centred])
def test_experts_that_are_no_experts_are_not_taken_for_some(kind) -> None:
    with pytest.raises(AutoparError) as caught:  # traced as it stands, which a loop over chosen experts cannot be
        traced(Moe(kind()).eval(), states())
    assert caught.value.slug == "data-dependent-control-flow"


def test_a_registered_layer(registration: None) -> None:
    model, x = Loop().eval(), states()
    made = traced(model, x)
    assert len(nodes(made)) == 1
    same(model, made, [x], model(x))
    assert type(model) is Loop
    torch.testing.assert_close(adapted(model, x), model(x))


def test_a_function_that_is_no_expert_is_refused() -> None:
    x, chosen = torch.randn(6, WIDTH), torch.zeros(6, 1, dtype=torch.long)
    weight = torch.randn(EXPERTS, WIDTH, WIDTH)
    for bad in (lambda r, w: r @ (w @ w), lambda r, w: (r - r.mean(0)) @ w, lambda r, w: r @ weight[0]):
        with pytest.raises(AutoparError) as caught:
            registered.body_of_function(bad, x, (weight,))
        assert caught.value.slug == "expert-body"
    out = autopar.experts(x, chosen, torch.ones(6, 1), weight, expert=lambda r, w: r @ w)
    torch.testing.assert_close(out, x @ weight[0])


def test_the_model_is_left_as_it_was() -> None:
    model = Moe()
    before = [(type(m), set(m.__dict__)) for m in model.modules()]
    traced(model, states())
    assert [(type(m), set(m.__dict__)) for m in model.modules()] == before
    assert isinstance(model.experts, Experts)
