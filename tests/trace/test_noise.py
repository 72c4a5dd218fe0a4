"""Ops that draw random numbers: their ranges and moments, and that no two draws are the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir import ops
from autopar.ir.evaluate import evaluate
from autopar.ir.program import Program
from tests.trace.test_normalize import program_of

X = torch.full((64, 64), 0.25)
MANY = 5 / 64  # five deviations of a mean of 64 * 64 numbers that deviate by one
DRAWS: dict[str, tuple[Callable[[Tensor], Any], float, float]] = {  # with mean and deviation
    "rand": (lambda x: torch.rand(64, 64), 0.5, 12**-0.5),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 12**-0.5),
    "uniform": (lambda x: x.clone().uniform_(-2.0, 4.0), 1.0, 6 * 12**-0.5),
    "randn": (lambda x: torch.randn(x.shape), 0.0, 1.0),
    "randn_like": (lambda x: torch.randn_like(x), 0.0, 1.0),
    "normal_": (lambda x: x.clone().normal_(1.0, 2.0), 1.0, 2.0),
    "normal": (lambda x: torch.normal(x, 2.0), 0.25, 2.0),
    "normal_by": (lambda x: torch.normal(x, x), 0.25, 0.25),
    "normal_of": (lambda x: torch.normal(1.0, 2.0, (64, 64)), 1.0, 2.0),
    "exponential": (lambda x: x.clone().exponential_(2.0), 0.5, 0.5),
    "bernoulli": (lambda x: torch.bernoulli(x), 0.25, 0.75**0.5 / 2),
    "bernoulli_": (lambda x: torch.zeros(64, 64).bernoulli_(x), 0.25, 0.75**0.5 / 2),
    "randint": (lambda x: torch.randint(2, 6, (64, 64)), 3.5, (15 / 12) ** 0.5),
    "randint_like": (lambda x: torch.randint_like(x, 4), 1.5, (15 / 12) ** 0.5),
    "gumbel": (lambda x: F.gumbel_softmax(x[:, :2].repeat(1, 32).view(-1, 2), hard=True)[:, 0], 0.5, 0.5),
    "choices": (lambda x: torch.multinomial(torch.arange(3.0).expand(64, 3) ** 2, 64, True), 1.8, 0.4),
    "standard": (lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(), 0.25, 1.0),
}  # fmt: skip


def draws(program: Program) -> list[Any]:
    return [n for n in program.graph.nodes if n.target is ops.draw]


@pytest.mark.parametrize("name", DRAWS)
def test_moments(name: str) -> None:
    function, mean, deviation = DRAWS[name]
    program = program_of(function, X)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        got, again = (evaluate(program, {}, [X])[0].double() for _ in range(2))
    assert abs(got.mean() - mean) < MANY * deviation
    assert abs(got.std() / deviation - 1) < 0.1
    assert not torch.equal(got, again)


def test_half_precision_draws_small_probabilities_and_no_zeros() -> None:
    p = torch.full((512, 512), 0.001, dtype=torch.bfloat16)
    drawn = [lambda x: torch.bernoulli(x), lambda x: torch.zeros_like(x).bernoulli_(x)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for draw in drawn:
            ones = evaluate(program_of(draw, p), {}, [p])[0].double().mean()
            assert abs(ones / p[0, 0].double() - 1) < 5 / (512 * 0.001**0.5)
        noise = evaluate(program_of(lambda x: x.clone().exponential_(), p), {}, [p])[0]
        picked = evaluate(program_of(lambda x: F.gumbel_softmax(x), p), {}, [p])[0]
    assert noise.min() > 0 and noise.max() > 8 and picked.isfinite().all()


def test_exponential_numbers_of_uniform_zeros_are_not_zero() -> None:
    program = program_of(lambda x: x.clone().exponential_().log(), X)
    for node in draws(program):
        node.target, node.args = torch.zeros_like, node.args[:1]
    assert evaluate(program, {}, [X])[0].isfinite().all()


def test_permutations_and_draws_without_return() -> None:
    program = program_of(lambda x: (torch.randperm(64), torch.multinomial(torch.ones(64, 5), 3)), X)
    order, chosen = evaluate(program, {}, [X])
    assert order.dtype == torch.int64 and torch.equal(order.sort().values, torch.arange(64))
    assert not torch.equal(order, torch.arange(64))
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in chosen.tolist())


def test_every_draw_has_a_key_of_its_own() -> None:
    program = program_of(lambda x: torch.rand(64) + torch.rand(64) + F.dropout(x, 0.5), X)
    assert len(draws(program)) == 2 and len({n.args[2] for n in draws(program)}) == 2


def test_no_gradient_goes_into_noise_that_torch_gives_none() -> None:
    w = torch.ones(64, requires_grad=True)
    out = evaluate(program_of(lambda x: torch.normal(x, 1.0) * x, X), {}, [w.expand(64, 64)])[0]
    (grad,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(grad, out.sum(0))  # as if the noise were a constant; x is 1
