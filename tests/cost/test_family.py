"""Closed forms of a family equal the price of programs that were lowered for real, and the facts of the literature."""

import numpy as np
import pytest
import sympy
import torch

from autopar.compile import lower
from autopar.cost.family import FIRST, LAST, Primes, family
from autopar.cost.forms import Forms
from autopar.cost.hardware import load as profile
from autopar.cost.links import Links
from autopar.cost.polynomials import Polynomials
from autopar.cost.price import BACKWARD, FORWARD
from autopar.cost.program import price
from autopar.cost.regime import Regime
from autopar.cost.search import Question
from autopar.cost.zero import Stage
from autopar.families import Example, families
from autopar.ir.mesh import Mesh
from autopar.models import load
from autopar.ranking import candidate, space_of

HARDWARE = profile("cpu")


@pytest.fixture(scope="module")
def model():
    return load("hf:llama3-8b-tiny").model.train()


@pytest.fixture(scope="module")
def made(model):
    return families(model, (), kwargs(2, 64), hardware=HARDWARE, precision="fp32")


def kwargs(rows: int, positions: int) -> dict:
    ids = torch.zeros(rows, positions, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": torch.zeros_like(ids)}


@pytest.mark.parametrize(
    ("mesh", "sequence"), [("dp=2,tp=2", False), ("dp=2,tp=2", True), ("dp=4,tp=2", False), ("tp=2", True)]
)
def test_closed_forms_equal_the_price_of_the_lowered_program(model, made, mesh, sequence):
    """At rows of the example, so that the solver, which weighs seconds, chooses the same layouts."""
    primes = Primes.apart({n for p in model.parameters() for n in p.shape}, 64)
    rows, positions, sizes = primes.rows, 2 * primes.positions, Mesh.parse(mesh)
    strategy = f"sequence_parallel={'true' if sequence else 'false'},hardware=cpu"
    lowered = lower(model, (), kwargs(rows, positions), sizes, strategy, after="reshard", loss_only=True)
    real = price(lowered, HARDWARE)
    axes = {a: np.array([float(sizes.size(a))]) for a in ("pp", "dp", "ep", "cp", "tp")}
    points = {"b": np.array([float(rows)]), "s": np.array([float(positions)]), **axes}
    links = Links.placed(HARDWARE, axes, ("pp", "dp", "ep", "cp", "tp"))
    times = [(u.unit.calls, u.times(points, links, HARDWARE)) for u in Forms(made[sequence, (False, False)]).units]
    for part, seconds in enumerate(real.compute_seconds):
        assert sum(n * (t.forward, t.backward)[part][0] for n, t in times) == pytest.approx(seconds, rel=1e-6)
    for when in (FORWARD, BACKWARD):
        sent = sum(t.seconds for t in real.traffic if (t.axis, t.when) == ("tp", when))
        assert sum(n * np.sum(t.messages.get(("tp", when), 0.0)) for n, t in times) == pytest.approx(sent, rel=1e-6)
    assert sum(n * t.activations["none"][0] for n, t in times) == pytest.approx(real.memory["activations"], rel=1e-6)
    assert 4 * sum(n * t.weight[0] for n, t in times) == pytest.approx(real.memory["gradients"])


@pytest.fixture(scope="module")
def mixture():
    return load("hf:mixtral-8x7b-tiny").model.train()


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2", "dp=2"])
def test_memory_of_experts_is_that_of_the_lowered_program(mixture, mesh):
    """Rows on their way to experts and back included; none where experts do not travel."""
    machine, sizes = profile(f"h100x{Mesh.parse(mesh).world}"), Mesh.parse(mesh)
    forms = tuple(Forms(f) for f in families(mixture, (), kwargs(2, 64), hardware=machine, precision="fp32").values())
    regime, space = Regime(engine=False, compute_width=4, reduce_width=4), space_of(machine, 16, 64)
    question = Question(forms, machine, space, regime, np.inf)
    (option,) = question.options(forms[0], candidate(sizes, {}, forms[0], 16, 64), np.zeros(1, int))
    rows = 16 // (sizes.size("dp") * sizes.size("ep"))
    lowered = lower(mixture, (), kwargs(rows, 64), sizes, "hardware=h100", after="reshard", loss_only=True)
    real = price(lowered, machine, zero=Stage(0)).memory
    for kind in ("gradients", "optimizer", "activations"):
        close = 5e-3 if kind == "activations" else 1e-6  # a router keeps its scores as on two ranks of tp
        assert option.memory[kind] == pytest.approx(real[kind], rel=close), kind
    rows_of_a_rank = rows * 64 * mixture.config.num_experts_per_tok * mixture.config.hidden_size * 4
    assert option.memory["workspace"] == real.get("workspace", 0) == ("ep" in mesh) * rows_of_a_rank


def test_one_rank_sends_nothing(made):
    one = {a: np.ones(1) for a in ("pp", "dp", "ep", "cp", "tp")}
    links = Links.placed(HARDWARE, one, ("pp", "dp", "ep", "cp", "tp"))
    for unit in Forms(made[True, (False, False)]).units:
        sent = unit.times({**one, "b": np.ones(1), "s": np.full(1, 32.0)}, links, HARDWARE).messages
        assert all(seconds == 0 for seconds in sent.values())


def test_layouts_hold_where_sizes_divide(made):
    tensor = made[False, (False, False)]
    assert tensor.allows("tp", 2)
    assert not tensor.allows("tp", 3)


def test_units_are_the_beginning_the_blocks_and_the_end(made):
    tensor = made[False, (False, False)]
    assert [u.name for u in tensor.units] == [FIRST, "model.layers.*", LAST]
    assert tensor.order == (1, 1)


def test_primes_tell_rows_and_positions_from_sizes_of_the_model():
    primes = Primes.apart({29, 31 * 4, 4096}, 64)
    assert 29 % primes.rows and 124 % primes.rows and 124 % primes.positions
    b, s, dp = sympy.symbols("b s dp", integer=True, positive=True)
    assert primes.size(4096) == 4096
    assert primes.size(2 * primes.rows) == b * dp
    assert primes.size(2 * primes.rows * 2 * primes.positions) == b * dp * s
    assert primes.size(2 * primes.positions - 1) == s - 1


def test_an_example_without_a_sequence_has_no_positions():
    pictures = Example.of((), {"x": torch.zeros(3, 3, 8, 8), "labels": torch.zeros(3, dtype=torch.int64)})
    assert pictures.positions is None
    text = Example.of((), {"ids": torch.zeros(3, 8, dtype=torch.int64)})
    assert (text.rows, text.positions) == (3, 8)


def test_polynomials_are_evaluated_on_a_grid():
    b, s, tp = sympy.symbols("b s tp")
    made = Polynomials.of([3 * b * s / tp + 2, 7, b**2 * (s - 1), 0])
    values = {"b": np.array([2.0, 3.0]), "s": np.array([4.0, 5.0]), "tp": np.array([2.0, 1.0])}
    assert made(values).tolist() == [[14.0, 47.0], [7.0, 7.0], [12.0, 36.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match="no sum of products"):
        Polynomials.of([sympy.Max(b, s)])


def test_fused_kernels_keep_and_move_less(model):
    ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    styles = [(False, False), (True, False), (True, True)]
    found = families(model, (), {"input_ids": ids, "labels": torch.zeros_like(ids)}, hardware=HARDWARE, styles=styles)
    at = {"b": 1.0, "s": 64.0, "dp": 1.0, "ep": 1.0, "cp": 1.0, "tp": 2.0}
    kept = [float(Polynomials.of([found[True, s].units[1].activations["none"]])(at)[0]) for s in styles]
    assert kept[0] > kept[1] > kept[2]


def test_fused_layers_of_experts_keep_what_megatron_keeps():
    """Latent attention, a router in float32 and experts: Megatron-LM 0.14 ``multi_latent_attention.py``, ``moe``."""
    loaded = load("hf:deepseek-v3-tiny").model.train()
    c, style = loaded.config, (True, True)
    found = families(loaded, (), kwargs(2, 64), hardware=HARDWARE, styles=[style], alone=True)[None, style]
    kept = Polynomials.of([found.units[2].activations["none"]])({"b": 1.0, "s": 1.0, "dp": 1.0, "ep": 1.0})
    query, out = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    attention = 2 * c.q_lora_rank + 2 * c.kv_lora_rank + c.qk_rope_head_dim
    attention += c.num_attention_heads * (2 * query + 2 * out)
    experts = c.num_experts_per_tok * (c.hidden_size + 3 * c.moe_intermediate_size)
    experts += 3 * c.n_shared_experts * c.moe_intermediate_size
    both = 2 * (4 * c.hidden_size + attention + experts) + 4 * c.num_attention_heads
    router = 5 * 4 * c.n_routed_experts + 16 * c.num_experts_per_tok + 8 * c.qk_rope_head_dim
    assert both <= float(kept[0]) <= both + router


def test_a_family_is_of_the_example_that_its_primes_tell(model):
    primes = Primes.apart({n for p in model.parameters() for n in p.shape}, 64)
    ids = torch.zeros(primes.rows, 2 * primes.positions, dtype=torch.int64, device="meta")
    lowered = lower(
        model, (), {"input_ids": ids, "labels": torch.zeros_like(ids)}, Mesh.parse("dp=2,tp=2"), after="reshard",
        loss_only=True,
    )  # fmt: skip
    b, s, tp = sympy.symbols("b s tp", integer=True, positive=True)
    block = family(lowered, primes).units[1]
    width = model.config.hidden_size
    assert sympy.simplify(block.hidden - 4 * b * s * width) == 0
    assert sympy.simplify(block.activations["full"] - block.hidden) == 0
    assert tp in sympy.sympify(block.activations["none"]).free_symbols
