"""Plans on their own programs: each lowered by the passes at its own sizes, priced by it, and ranked again."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.cli.arguments import split_axes
from autopar.cli.main import main
from autopar.compile import lower, trace_in
from autopar.cost.candidates import ORDER
from autopar.cost.exact import exact
from autopar.cost.forms import Forms
from autopar.cost.hardware import load as profile
from autopar.cost.links import Links
from autopar.cost.price import BACKWARD, FORWARD
from autopar.cost.program import price
from autopar.cost.regime import Regime
from autopar.errors import AutoparError
from autopar.families import Example, Sample
from autopar.ir.mesh import Mesh
from autopar.ir.printer import print_program
from autopar.lowering import Lowering
from autopar.models import load
from autopar.planner import plan
from autopar.plans import Plan
from autopar.ranking import lowered, priced
from autopar.resized import Resize
from autopar.solve.batch import settle_outputs

HARDWARE = profile("h100x8")
# As programs are priced: nothing hides, and gradients are one message.
PLAIN = Regime(overlap=0.0, compute_width=4, reduce_width=4, update=0.0, engine=False)


def text(rows: int, positions: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, positions, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": torch.zeros_like(ids)}


def named(name: str) -> nn.Module:
    return load(f"hf:{name}").model.train()


@pytest.mark.parametrize("name", ["llama3-8b-tiny", "mixtral-8x7b-tiny", "gemma2-9b-tiny", "vit-base-tiny"])
def test_a_trace_that_is_resized_is_the_trace_at_those_sizes(name: str) -> None:
    loaded = load(f"hf:{name}")
    model, kwargs = loaded.model.train(), loaded.kwargs(2, 64)
    sample = Sample.of(model, (), kwargs)
    found = Resize(sample.primes, 48, 128)(sample.program)
    args, sized = Example.of((), kwargs).shaped(48, 128)
    own = trace_in("bf16", model, args, sized, mesh=Mesh.parse("dp=1"), train=True)
    assert found is not None
    assert print_program(replace(found, mesh=Mesh.parse("dp=1"))) == print_program(settle_outputs(own.program))


class Halves(nn.Module):
    """Adds the first half of a row to the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        half = ids.shape[1] // 2
        rows = self.table(ids)
        return (rows[:, :half] + rows[:, -half:]).square().sum()


def test_a_size_without_a_counterpart_has_no_program() -> None:
    """Half of an odd length is no whole number: such a plan is traced at its own sizes."""
    model, ids = Halves().to("meta"), torch.zeros(2, 64, dtype=torch.int64)
    sample = Sample.of(model, (ids,), {})
    assert Resize(sample.primes, 48, 96)(sample.program) is not None
    assert Resize(sample.primes, 48, 65)(sample.program) is None
    found = plan(model, "h100x8", (ids,), batch=48, sequence=65, axes=("dp",), lower=1)
    assert found.lowered == 1 and not found.dropped


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("llama3-8b-tiny", "dp=2,tp=2", ""),
        ("llama3-8b-tiny", "dp=2,tp=4", "sequence_parallel=true"),
        ("llama3-8b-tiny", "tp=8", ""),  # more ranks than heads of keys: the axis is split
        ("llama3-8b-tiny", "dp=2,cp=2,tp=2", "context_parallel=ulysses"),
        ("mixtral-8x7b-tiny", "dp=2,ep=2,tp=2", ""),
    ],
)
def test_numbers_of_one_program_are_those_of_its_price(name: str, mesh: str, strategy: str) -> None:
    sizes = Mesh.parse(mesh)
    program = lower(
        named(name), (), text(8, 64), sizes, f"{strategy},hardware=h100".strip(","), after="reshard", loss_only=True
    )
    real = price(program, HARDWARE)
    forms = Forms(exact(program, None, sequence="sequence" in strategy, positions=64))
    axes = {a: np.array([float(sizes.size(a))]) for a in ORDER}
    order = (*(a for a in ORDER if a not in sizes.names), *sizes.names)
    points = {"b": np.array([8.0]), "s": np.array([64.0]), **axes}
    times = [(u.unit.calls, u.times(points, Links.placed(HARDWARE, axes, order), HARDWARE)) for u in forms.units]
    for part, seconds in enumerate(real.compute_seconds):
        assert sum(n * float(np.sum((t.forward, t.backward)[part])) for n, t in times) == pytest.approx(seconds)
    for axis in sizes.names:
        for when in (FORWARD, BACKWARD):
            sent = sum(t.seconds for t in real.traffic if program.mesh.base(t.axis) == axis and t.when == when)
            every = (n * np.sum(m.get((axis, when), 0.0)) for n, t in times for m in (t.messages, t.once))
            assert sum(every) == pytest.approx(sent), (axis, when)
    close = 5e-3 if "ep" in sizes.names else 1e-9  # families count both results of a choice of experts, programs one
    held = sum(n * float(t.activations["none"][0]) for n, t in times)
    assert held == pytest.approx(real.memory["activations"], rel=close)
    assert 4 * sum(n * float(t.weight[0]) for n, t in times) == pytest.approx(real.memory["gradients"])


@pytest.fixture(scope="module")
def mixture() -> Any:
    """The plans of a small space, as the search ranks them and as their programs do."""
    model, kwargs = named("mixtral-8x7b-tiny"), text(2, 16)
    searched = plan(model, "h100x8", (), kwargs, count=8, lower=0)
    return model, kwargs, searched, plan(model, "h100x8", (), kwargs, count=12, lower=8)


def test_plans_are_ranked_by_the_price_of_their_programs(mixture: Any) -> None:
    """Without an axis of experts all gradients are one message, of which the search makes two: it prefers experts."""
    _, _, searched, found = mixture
    near = found[:8]
    assert [p.priced_by for p in found] == ["program"] * 8 + ["closed forms"] * 4
    assert {p.words for p in near} == {p.words for p in searched}
    assert [p.words for p in near] != [p.words for p in searched]
    assert [p.seconds for p in near] == sorted(p.seconds for p in near)
    for p in near:
        assert p.searched == next(q.option for q in searched if q.words == p.words)
    assert "priced by" in str(found) and "the first 8 were lowered" in str(found)
    assert "priced by" not in str(searched)
    assert near[0].explain()


def test_the_order_is_the_same_without_the_trace_of_the_families(mixture: Any) -> None:
    """Each on a trace at its own sizes: the same programs, so the same prices to the last bit."""
    model, kwargs, searched, found = mixture
    again = lowered(searched, Lowering(model, (), kwargs, "bf16"), 8, 8)
    assert [(p.words, p.option) for p in again] == [(p.words, p.option) for p in found[:8]]


def test_what_cannot_be_lowered_falls_out_with_its_reason(mixture: Any) -> None:
    _, _, searched, found = mixture
    prices = {p.words: p for p in found[:8]}
    large = next(p.words for p in searched if p.option.sizes["ep"] > 1)

    def refusing(p: Plan) -> Plan:
        if p.option.sizes["cp"] > 1:
            raise AutoparError("no-such-thing", "rings are out")
        near = prices[p.words]
        return replace(near, option=replace(near.option, memory={"gradients": 1e15})) if p.words == large else near

    left = lowered(searched, refusing, 3, 4)
    out = [p.words for p in searched if p.option.sizes["cp"] > 1]
    assert left.lowered == 3 and all(p.words not in (*out, large) for p in left[:3])
    assert left.dropped[: len(out)] == tuple(f"{w}: rings are out [no-such-thing]" for w in out)
    over = left.dropped[len(out)]
    assert large in over and "its program does not fit: " in over and over.endswith("[over-memory]")
    assert f"passed over, as it cannot be lowered: {left.dropped[0]}" in left.said

    def never(p: Plan) -> Plan:
        raise AutoparError("no-such-thing", "nothing at all")

    none = lowered(searched, never, 3, 4)
    assert not none and none.hint.startswith("no plan that fits can be lowered:") and "nothing at all" in none.hint


def test_the_command_says_which_were_lowered(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "hf:llama3-8b-tiny", "h100x4", "--seq", "64", "--json"]
    assert main([*asked, "--lower", "2"]) == 0
    out, err = capsys.readouterr()
    assert [r["priced_by"] for r in json.loads(out)] == ["program"] * 2 + ["closed forms"] * 6
    assert "the first 2 were lowered" in err
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert {r["priced_by"] for r in json.loads(out)} == {"closed forms"} and "lowered" not in err


@pytest.mark.parametrize(("strategy", "length"), [("dp=2,cp=4", 1001), ("cp=8,context_parallel=ring", 1000)])
def test_positions_that_do_not_divide_cost_about_what_their_program_does(
    strategy: str, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The closed forms take the next number that divides; a run shares out those that there are."""
    model, machine = named("llama3-8b-tiny"), replace(HARDWARE, overlap=0.0)
    asked = [(strategy, *split_axes(strategy))]
    made = [Forms(f) for f in Sample.of(model, (), text(2, 64), precision="fp32").families(machine).values()]
    ((_, found),) = priced(made, machine, asked, 8, length, PLAIN)
    assert found.tokens == 8 * length and found.found.question.space.positions == 1008
    sizes = Mesh.parse(found.mesh)
    own = text(8 // sizes.data_size, length)
    given = f"context_parallel={found.option.context},hardware=h100"
    real = price(lower(model, (), own, sizes, given, after="reshard", loss_only=True), machine)
    assert found.seconds == pytest.approx(float(real.step_seconds), rel=0.02)
    assert found.option.memory["activations"] == pytest.approx(float(real.memory["activations"]), rel=0.02)
    assert main(["compare", "hf:llama3-8b-tiny", "--cluster", "h100x8", "--seq", str(length), strategy]) == 0
    assert f"{length} positions are shared out unevenly, and priced as 1008" in capsys.readouterr().err


def test_positions_that_tp_cannot_share_are_refused_with_the_reason() -> None:
    made = [Forms(f) for f in Sample.of(named("llama3-8b-tiny"), (), text(2, 64)).families(HARDWARE).values()]
    with pytest.raises(AutoparError, match="sequence_parallel with 1001 positions that 2 does not divide") as error:
        strategy = "dp=4,tp=2,sequence_parallel=true"
        priced(made, HARDWARE, [(strategy, *split_axes(strategy))], 8, 1001, PLAIN)
    assert error.value.slug == "indivisible-dim" and "as 1002" in str(error.value)
