"""The passes ``zero`` and ``recompute`` on programs: what they record, what they refuse, what the verifier sees."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.errors import AutoparError
from autopar.ir.layout import I, Layout
from autopar.ir.printer import print_program
from autopar.ir.program import Chunk, Engine, Form, Program
from autopar.passes.base import Context
from autopar.passes.pipeline import parse, run, unparse
from autopar.passes.recompute import POLICIES, Recompute
from autopar.passes.zero import OFFLOADS, PRECISIONS, Zero
from autopar.verify import check_program
from tests.conftest import Golden
from tests.passes.models import traced

LOCAL = "data-parallel,tensor-parallel,context-parallel,reshard,localize"
GOLDENS = {
    "zero/mlp": ("Weights in quarters: tp cuts one dim, data ranks dim 0.", "mlp", "dp=2,tp=2", "zero{stage=3}"),
    "zero/copies": ("Two copies of shards over two ranks.", "tied", "dp=4", "zero{stage=2 shard=2}"),
    "zero/replicated": ("Stage 0: gradients are reduced, nothing is gathered.", "mlp", "dp=2", "zero"),
    "recompute/tied": ("Equal layers keep their inputs only.", "tied", "dp=2", "zero,recompute{policy=full}"),
}


def local(model: str = "mlp", mesh: str = "dp=2,tp=2") -> Program:
    return run(traced(model, mesh), LOCAL)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(golden: Golden, name: str) -> None:
    says, model, mesh, text = GOLDENS[name]
    program = run(local(model, mesh), text)
    assert program.form == Form.STAGED
    golden("\n".join([says, f"pipeline: {LOCAL},{text}", print_program(program)]), f"passes/{name}.text")


ZERO = st.builds(
    Zero,
    stage=st.integers(1, 3),
    shard=st.integers(0, 8),
    precision=st.sampled_from(PRECISIONS),
    offload=st.sampled_from(OFFLOADS),
    prefetch=st.integers(0, 3),
)


@given(ZERO, st.sampled_from(POLICIES))
@settings(deadline=None, derandomize=True)
def test_text_round_trip(zero: Zero, policy: str) -> None:
    text = unparse([zero, Recompute(policy)])
    assert parse(text) == (zero, Recompute(policy)) and unparse(parse(text)) == text


@pytest.mark.parametrize(
    ("strategy", "tail"),
    [
        ("", ""),
        ("zero=3", ",zero{stage=3}"),
        ("zero=1,zero_shard_size=4,prefetch=2,offload=cpu", ",zero{stage=1 shard=4 prefetch=2 offload=cpu}"),
        ("precision=bf16", ",zero{precision=bf16}"),
        ("recompute=selective", ",zero,recompute{policy=selective}"),
    ],
)
def test_a_strategy_is_its_pipeline(strategy: str, tail: str) -> None:
    assert autopar.Strategy.of(strategy).pipeline == LOCAL + tail


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 4},
        {"precision": "fp16"},
        {"offload": "disk", "stage": 1},
        {"offload": "cpu"},
        {"shard": 2},
        {"prefetch": 1},
    ],
)
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(AutoparError) as caught:
        Zero(**options)  # type: ignore[arg-type]
    assert caught.value.slug == "bad-strategy"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(AutoparError, match="sometimes") as caught:
        Recompute("sometimes")
    assert caught.value.slug == "bad-strategy"


def test_shard_sizes_divide_the_data_ranks() -> None:
    with pytest.raises(AutoparError, match="zero_shard_size in 1, 2, 4") as caught:
        run(local(mesh="dp=4"), "zero{stage=3 shard=3}")
    assert caught.value.slug == "zero-shard-size"


def test_recompute_says_where_it_does_nothing() -> None:
    context = Context()
    run(local(), "zero,recompute{policy=full}", context)
    assert context.warnings == ["recompute=full: the model has no equal layers, so nothing is recomputed"]


def test_the_dim_that_divides_is_cut() -> None:
    program = run(local("mlp", "dp=2"), "zero{stage=3}")
    for param in program.params.values():
        if param.kind == "parameter":
            assert param.chunk is not None
            dim = param.chunk.dim
            assert dim == 0 or (param.spec.shape[0] % 2 and param.spec.shape[dim] % 2 == 0)


def first(program: Program) -> str:
    return next(n for n, p in program.params.items() if p.kind == "parameter")


def engine(program: Program) -> Engine:
    assert program.engine is not None
    return program.engine


def missing(program: Program) -> None:
    groups = engine(program).groups
    program.engine = replace(engine(program), groups=(replace(groups[0], names=groups[0].names[1:]), *groups[1:]))


def doubled(program: Program) -> None:
    groups = engine(program).groups
    program.engine = replace(engine(program), groups=(*groups, groups[0]))


def elsewhere(program: Program) -> None:
    groups = engine(program).groups
    program.engine = replace(engine(program), groups=(replace(groups[0], unit="nowhere"), *groups[1:]))


def whole(program: Program) -> None:
    program.params[first(program)] = replace(program.params[first(program)], chunk=None)


def cut(program: Program) -> None:
    program.engine = replace(engine(program), ways=1)
    program.params[first(program)] = replace(program.params[first(program)], chunk=Chunk(0, 2))


def invariant(program: Program) -> None:
    param = program.params[first(program)]
    assert param.layout is not None
    types = dict(param.layout.types) | {"dp": I}
    program.params[param.name] = replace(param, layout=Layout.of(types))


@pytest.mark.parametrize(
    ("spoil", "slug"),
    [
        (missing, "engine-units"),
        (doubled, "engine-units"),
        (elsewhere, "engine-units"),
        (whole, "engine-units"),
        (cut, "engine-units"),
        (invariant, "double-reduction"),
    ],
)
def test_the_verifier_sees_it(spoil: Callable[[Program], None], slug: str) -> None:
    program = run(local(), "zero{stage=3}")
    check_program(program)
    spoil(program)
    with pytest.raises(AutoparError) as caught:
        check_program(program)
    assert caught.value.slug == slug
