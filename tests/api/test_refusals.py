"""What parallelize and the module refuse: one clear error, on every rank, and never a hang."""

import copy
import io
import pickle
import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import AutoparError
from autopar.emit.pipelined import CLASSES
from autopar.strategy import KINDS, LATER
from tests.api.models import WIDTH, Attention, Lm, Mlp, Odd, batch, features, seeded, squares
from tests.ranks import Ranks

X = (4, 6, WIDTH)


def make(mesh: str, strategy: Any = None) -> Any:
    return autopar.parallelize(seeded(Mlp), mesh, args=(features(*X),), loss=squares, strategy=strategy)


@pytest.mark.parametrize(
    ("mesh", "slug", "words"),
    [
        ("dp=2,tp=3", "bad-mesh", ["dp=2", "tp=3", "6", "world size is 4"]),
        ("tp=2", "bad-mesh", ["2 ranks", "world size is 4"]),
        ("model=4", "bad-mesh", ["'model'", "pp, dp, ep, cp, tp"]),
        ("tp=-2,dp=-2", "bad-mesh", ["tp has size -2"]),
        ("tp=0", "bad-mesh", ["tp has size 0"]),
        ("tp:4", "bad-mesh", ["'tp:4'"]),
        ("tp=2,tp=2", "bad-mesh", ["twice"]),
        ("ep=4", "no-experts", ["ep=4"]),
    ],
)
def test_meshes(ranks: Ranks, mesh: str, slug: str, words: list[str]) -> None:
    for error in ranks.refused(4, slug, make, mesh):
        assert all(word in error.message for word in words), error
        assert error.fix


def nameless() -> None:
    autopar.parallelize(seeded(Mlp), dist.device_mesh.init_device_mesh("cpu", (2,)), args=(features(*X),))


def test_device_mesh_without_names(ranks: Ranks) -> None:
    ranks.refused(2, "bad-mesh", nameless)


def test_torch_distributed_is_not_initialized() -> None:
    with pytest.raises(AutoparError, match="not initialized") as raised:
        make("tp=2")
    assert raised.value.slug == "bad-mesh" and "torchrun" in str(raised.value.fix)


@pytest.mark.parametrize(
    ("strategy", "slug", "words"),
    [
        ("sequence", "bad-strategy", ["sequence"]),
        ("passes=no-such-pass", "bad-pipeline", ["no-such-pass"]),
        ("hardware=abacus", "unknown-hardware", ["abacus"]),
    ],
)
def test_strategies(strategy: str, slug: str, words: list[str]) -> None:
    with pytest.raises(AutoparError) as raised:
        make("dp=1", strategy)
    assert raised.value.slug == slug
    assert all(word in raised.value.message for word in words)


@pytest.mark.parametrize(
    ("field", "wrong", "allowed"),
    [
        ("zero", ["true", "one", "", "4", "-1", "1.5"], "a whole number from 0 to 3"),
        ("microbatches", ["two", "0", ""], "a whole number, at least 1, or left out"),
        ("virtual_stages", ["a", "-2"], "a whole number, at least 1, or left out"),
        ("schedule", ["foo", "", "1F1B"], "one of gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipev, or left out"),
        ("zero_shard_size", ["x", "true"], "a whole number, at least 0, or left out"),
        ("expert_capacity", ["1.5.2", "0", "nan", "inf", ""], "a positive number, or left out"),
        ("sequence_parallel", ["maybe", "2"], "true or false"),
        ("precision", ["fp16"], "one of fp32, bf16"),
    ],
)
def test_values_of_fields(field: str, wrong: list[str], allowed: str) -> None:
    for value in wrong:
        for make in (lambda: autopar.Strategy.of(f"{field}={value}"), lambda: autopar.Strategy(**{field: value})):  # noqa: B023
            with pytest.raises(AutoparError, match=f"^{field} is {value!r}|^{field} is {value} ") as raised:
                make()
            assert raised.value.slug == "bad-strategy" and raised.value.fix == f"{field}: {allowed}"


def test_values_of_every_field_are_known() -> None:
    assert sorted(KINDS) == sorted(f.name for f in fields(autopar.Strategy))
    assert all(KINDS["schedule"].holds(name) for name in CLASSES)
    for wrong in ({"zero": True}, {"zero": None}, {"stages": ("layers.1", 2)}, {"hardware": 5}, {"recompute": None}):
        with pytest.raises(AutoparError, match="bad-strategy"):
            autopar.Strategy(**wrong)
    text = "zero=2,microbatches=4,stages=layers.1+layers.2,expert_capacity=1.5,strict,recompute=none"
    again = autopar.Strategy.of(text)
    assert (
        again == autopar.Strategy.of(str(again)) and again.stages == ("layers.1", "layers.2") and again.strict is True
    )


@pytest.mark.parametrize("name", LATER)
def test_strategies_of_later_versions(name: str) -> None:
    with pytest.raises(AutoparError, match=f"Strategy\\({name}='other'\\)") as raised:
        autopar.Strategy(**{name: "other"})
    assert raised.value.slug == "unsupported-strategy"


def test_module_that_was_not_called() -> None:
    pm = autopar.parallelize(seeded(Mlp), "dp=1")
    for use in (pm.state_dict, pm.parameters, pm.dump, lambda: pm.clip_grad_norm_(1.0), lambda: pm.streams):
        with pytest.raises(AutoparError) as raised:
            use()
        assert raised.value.slug == "not-compiled"


def odd_one(way: str, late: bool) -> None:
    """Rank 1 differs in one thing, at ``parallelize`` or at a later call."""
    odd = dist.get_rank() == 1
    model = seeded(Lm, layers=1) if not (odd and way == "layers") else seeded(Lm, layers=2)
    if odd and way == "weights":
        torch.manual_seed(5)
        model = Lm(layers=1)
    plain = batch()
    kwargs: dict[str, Any] = dict(plain)
    if odd and way == "length":
        kwargs = batch(length=7)
    elif odd and way == "rows":
        kwargs = batch(rows=3)
    elif odd and way == "values":
        kwargs = batch(seed=9)
    elif odd and way == "names":
        kwargs = {"ids": plain["ids"]}
    elif odd and way == "dtype":
        kwargs["ids"] = plain["ids"].int()
    if way == "mode" and odd and not late:
        model.eval()
    pm = autopar.parallelize(model, "dp=2,tp=2" if way == "layers" else "tp=4", kwargs=plain if late else kwargs)
    pm.train_step(**plain)
    if way == "mode" and odd:
        pm.eval()
    if way == "call" and odd:
        pm(**kwargs)
    else:
        pm.train_step(**kwargs)


@pytest.mark.parametrize("way", ["length", "rows", "values", "names", "dtype", "mode", "layers", "weights"])
def test_ranks_that_disagree(ranks: Ranks, way: str) -> None:
    for error in ranks.refused(4, "rank-mismatch", odd_one, way, False):
        assert "1" in error.message


@pytest.mark.parametrize("way", ["length", "rows", "values", "names", "mode", "call"])
def test_ranks_that_disagree_at_a_later_call(ranks: Ranks, way: str) -> None:
    ranks.refused(4, "rank-mismatch", odd_one, way, True)


def one_raises() -> None:
    model = seeded(Lm) if dist.get_rank() != 1 else nn.Sequential(Lm())
    autopar.parallelize(model, "tp=2", kwargs={**batch(), **({"odd": 1} if dist.get_rank() == 1 else {})})


def test_an_error_of_one_rank_is_an_error_of_all(ranks: Ranks) -> None:
    answers = ranks.answers(2, one_raises)
    assert all(a.error is not None for a in answers)


def op_that_is_refused() -> None:
    model = nn.Sequential(seeded(nn.Linear, WIDTH, WIDTH), nn.InstanceNorm1d(6, track_running_stats=True))
    autopar.parallelize(model, "dp=2", args=(features(*X),), loss=squares)


def test_an_op_that_is_refused_is_said_on_every_rank(ranks: Ranks) -> None:
    for error in ranks.refused(2, "unsupported-op", op_that_is_refused):
        assert "running statistics" in error.message


def heads(count: int) -> None:
    autopar.parallelize(seeded(Attention, count), "tp=4", args=(features(2, 5, 8 * count),), loss=squares)


def test_heads_that_do_not_divide(ranks: Ranks) -> None:
    for error in ranks.refused(4, "indivisible-dim", heads, 6):
        assert "6 heads" in error.message and "tp=4" in error.message
        assert "1, 2, 3, 6" in str(error.fix)


def odd_op(strict: bool, mesh: str = "tp=2") -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), seeded(Odd))
    autopar.parallelize(seeded(lambda: model), mesh, args=(features(*X),), loss=squares, strategy=f"strict={strict}")


@pytest.mark.parametrize(("mesh", "rows", "state"), [("tp=2", 4, "whole"), ("dp=2", 8, "gathered")])
def test_op_without_a_rule(ranks: Ranks, mesh: str, rows: int, state: str) -> None:
    for answer in ranks.answers(2, odd_op, False, mesh):
        assert answer.error is None, answer.trace
        (text,) = (w for w in answer.warnings if "rule" in w)
        assert re.match(r"module '\S+' \(models.py:\d+ in forward", text) and "return self.down(" in text
        assert "autopar_tests.mystery" in text and f"{state} ({rows * 6 * 32 * 4} bytes)" in text


def test_op_without_a_rule_under_strict(ranks: Ranks) -> None:
    for error in ranks.refused(2, "no-rule", odd_op, True):
        assert "models.py:" in error.message


def test_no_loss() -> None:
    pm = autopar.parallelize(seeded(Mlp), "dp=1", args=(features(*X),))
    with pytest.raises(AutoparError) as raised:
        pm.train_step(features(*X))
    assert raised.value.slug == "no-loss"
    assert pm(features(*X)).shape == X


def test_nothing_trainable() -> None:
    pm = autopar.parallelize(seeded(Lm).requires_grad_(False), "dp=1", kwargs=batch())
    with pytest.raises(AutoparError) as raised:
        pm.train_step(**batch())
    assert raised.value.slug == "no-gradient"


def mismatched(way: str) -> None:
    pm = autopar.parallelize(seeded(Mlp), "tp=2", args=(features(*X),), loss=squares)
    state = seeded(Mlp).state_dict()
    if way == "missing":
        del state["up.weight"]
    elif way == "unexpected":
        state["odd.weight"] = torch.zeros(2)
    else:
        state["up.weight"] = torch.zeros(3, WIDTH)
    before = pm.full_parameters()
    try:
        pm.load_state_dict({n: t + 1 for n, t in state.items()})
    finally:
        after = pm.full_parameters()
        assert all(torch.equal(t, after[n]) for n, t in before.items())


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("missing", ["missing", "up.weight"]),
        ("unexpected", ["unexpected", "odd.weight"]),
        ("shape", ["up.weight", "[3, 16]", "[32, 16]"]),
    ],
)
def test_state_dicts_that_do_not_fit(ranks: Ranks, way: str, words: list[str]) -> None:
    for error in ranks.refused(2, "state-dict-mismatch", mismatched, way):
        assert all(word in error.message for word in words), error


def test_calls_of_another_structure() -> None:
    pm = autopar.parallelize(seeded(Lm), "dp=1", kwargs=batch())
    for args, kwargs, words in (
        ((), {**batch(), "odd": torch.zeros(4)}, "unexpected keyword argument 'odd'"),
        ((), {}, "missing a required argument: 'ids'"),
        ((SimpleNamespace(),), {}, "SimpleNamespace"),
    ):
        with pytest.raises(AutoparError, match=words) as raised:
            pm.train_step(*args, **kwargs)
        assert raised.value.slug == "input-structure"


def test_module_stays_where_it_is() -> None:
    pm = autopar.parallelize(seeded(Lm), "dp=1", kwargs=batch())
    assert pm.to("cpu").float() is pm
    with pytest.raises(AutoparError) as raised:
        pm.double()
    assert raised.value.slug == "fixed-module"


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x).mean(0) - self.one.bias).pow(2).sum()


def test_coupled_rows_outside_of_any_module() -> None:
    with pytest.raises(AutoparError) as raised:
        autopar.parallelize(Centred(), "dp=1", args=(torch.ones(4, 4),), strategy="microbatches=2")
    assert raised.value.slug == "batch-coupled-loss"
    assert raised.value.message.count("sub_tensor") == 1, raised.value


def test_the_largest_of_all_rows_is_not_known_to_microbatches() -> None:
    class Highest(Centred):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x).amax(0).sum()

    with pytest.raises(AutoparError) as raised:
        autopar.parallelize(Highest(), "dp=1", args=(torch.ones(4, 4),), strategy="microbatches=2")
    assert raised.value.slug == "batch-coupled-loss"


def test_pickle_names_what_saves() -> None:
    pm = autopar.parallelize(seeded(Lm), "dp=1", kwargs=batch())
    for dump in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(AutoparError, match="pm.save"):
            dump(pm)
    assert copy.copy(pm).state_dict().keys() == pm.state_dict().keys()
    torch.save(pm.state_dict(), io.BytesIO())


def test_rows_chosen_by_a_mask_say_the_way_out() -> None:
    class Masked(Centred):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x)[x[:, 0] > 0].exp().mean()

    with pytest.raises(AutoparError) as raised:
        autopar.parallelize(Masked(), "dp=1", args=(torch.ones(4, 4),))
    assert raised.value.slug == "data-dependent-control-flow" and "how many elements" in raised.value.message
    assert "mask.sum()" in str(raised.value.fix)


def test_inputs_do_not_reach_microbatches_whole_to_be_computed_in_each() -> None:
    class Several(Centred):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = [self.one(x * n) for n in range(3)]
            return sum((v - v.mean(0)).pow(2).sum() for v in y)

    with pytest.raises(AutoparError) as raised:
        autopar.parallelize(Several(), "dp=1", args=(torch.ones(4, 4),), strategy="microbatches=2")
    assert raised.value.slug == "batch-coupled-loss"


def test_an_op_without_a_rule_is_named_where_microbatches_meet_it() -> None:
    class Filled(Centred):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x)
            return y.masked_scatter(y > 0, x).pow(2).sum()

    with pytest.raises(AutoparError) as raised:
        autopar.parallelize(Filled(), "dp=1", args=(torch.ones(4, 4),), strategy="microbatches=2")
    assert raised.value.slug == "batch-coupled-loss" and "aten.masked_scatter.default has no" in raised.value.message


def parts(wrapped: str) -> None:
    model: Any = seeded(Mlp)
    if wrapped == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif wrapped == "script":
        model = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    pm = autopar.parallelize(model, "dp=2", args=(features(*X),), loss=squares)
    if wrapped == "twice":
        autopar.parallelize(pm, "dp=2", args=(features(*X),), loss=squares)
    if wrapped == "hook":
        next(pm.parameters()).register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
        pm.train_step(features(*X))
        assert not next(iter(pm.full_gradients().values())).any()
        next(pm.parameters()).register_hook(lambda grad: grad * 2)
    pm.train_step(features(*X))


@pytest.mark.parametrize(
    ("wrapped", "slug"),
    [("ddp", "wrapped-model"), ("script", "wrapped-model"), ("twice", "wrapped-model"), ("hook", "gradient-hook")],
)
def test_what_the_engines_would_not_see(ranks: Ranks, wrapped: str, slug: str) -> None:
    ranks.refused(2, slug, parts, wrapped)


def test_a_layer_is_not_called_by_itself() -> None:
    model = nn.Sequential(*(seeded(Mlp) for _ in range(3)))
    pm = autopar.parallelize(model, "dp=1", args=(features(*X),), loss=squares)
    with pytest.raises(AutoparError) as caught:
        pm[0](features(*X))
    assert caught.value.slug == "part-called"
    for call in (lambda: pm[0](x=features(*X)), lambda: next(iter(pm[0].children()))(features(*X))):
        with pytest.raises(AutoparError, match="part-called"):
            call()
