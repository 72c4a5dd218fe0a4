"""Facts of the literature as identities of the model's own formulas (design, section 9)."""

import numpy as np
import pytest
import sympy

from autopar.cost.candidates import SCHEDULES, Candidates
from autopar.cost.closed import Family, Kernel, Unit
from autopar.cost.communication import collective_bytes
from autopar.cost.forms import Forms
from autopar.cost.hardware import load
from autopar.cost.links import send_seconds
from autopar.cost.memory import MIXED_ADAM, states
from autopar.cost.regime import Regime
from autopar.cost.schedule import schedule as schedule_of
from autopar.cost.step import hops, steps
from autopar.cost.timeline import Times, simulate
from autopar.cost.zero import Stage

PSI, N, P, M, V = sympy.symbols("Psi N p m v", positive=True)


def sent(stage: int) -> sympy.Expr:
    parts = Stage(stage).sent(PSI, 0, 2)
    return sympy.simplify(sum(collective_bytes(c, whole, N) for c, _, whole, _ in parts))


def test_data_parallel_gradients_are_two_sizes_less_one_share():
    assert sympy.simplify(sent(0) - 2 * PSI * (N - 1) / N) == 0


def test_zero_one_and_two_send_as_much_and_three_half_as_much_again():
    assert sympy.simplify(sent(1) - sent(0)) == 0
    assert sympy.simplify(sent(2) - sent(0)) == 0
    assert sympy.simplify(sent(3) - sent(0) * sympy.Rational(3, 2)) == 0


@pytest.mark.parametrize(("stage", "bytes_"), [(0, 16 + 0 / N), (1, 4 + 12 / N), (2, 2 + 14 / N), (3, 16 / N)])
def test_zero_states_are_table_one(stage, bytes_):
    assert sympy.simplify(states(PSI, MIXED_ADAM, stage, N).total - PSI * bytes_) == 0


def pipeline(p: int, m: int, schedule: str, virtual: int = 1, backward: float = 2.0, sent: float = 0.0):
    """A model of equal blocks whose ends cost nothing, on a pipeline whose messages have ``sent`` bytes."""
    work = Kernel("memory", (0, 0), (1e11, backward * 1e11), None, "float32")
    policies = {"none": 7.0, "selective": 5.0, "full": 1.0, "transient": 0.0, "alone": 0.0, "scores": 0.0}
    end = dict.fromkeys(policies, 0.0)
    block = Unit("block", 1, ((1, work),), (), {}, policies, sent, (0, 0))
    first, last = (Unit(n, 1, (), (), {}, end, 0, (0, 0)) for n in ("first", "last"))
    made = Family(False, (first, block, last), (1,) * 48, {})
    column = {n: np.array([float(v)]) for n, v in {
        "rows": 1, "microbatches": m, "zero": 0, "shard": 0, "recompute": 0, "schedule": SCHEDULES.index(schedule),
        "virtual": virtual, "offload": 0, "ulysses": 0,
    }.items()}  # fmt: skip
    sizes = {a: np.array([float(n)]) for a, n in {"pp": p, "dp": 1, "ep": 1, "cp": 1, "tp": 1}.items()}
    found = steps(Forms(made), load("h100"), Candidates(sizes, positions=1.0, **column), Regime(cuts="even"))
    ideal = m * (48 / p) * (1 + backward) * 1e11 / (load("h100").memory_bandwidth * load("h100").memory_efficiency)
    return found, ideal


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8), (16, 64)])
def test_bubble_of_gpipe_and_1f1b(schedule, p, m):
    found, ideal = pipeline(p, m, schedule)
    assert found.bubble[0] / (ideal + found.bubble[0]) == pytest.approx((p - 1) / (m + p - 1), rel=1e-2)


@pytest.mark.parametrize("virtual", [2, 3])
def test_interleaving_divides_the_idle_time(virtual):
    plain, ideal = pipeline(4, 8, "1f1b")
    assert pipeline(4, 8, "interleaved", virtual)[0].bubble[0] == pytest.approx(plain.bubble[0] / virtual, rel=1e-2)


def test_zero_bubble_schedules_wait_less():
    waits = [pipeline(4, 8, name, v)[0].bubble[0] for name, v in (("1f1b", 1), ("zero-bubble", 1), ("zbv", 2))]
    assert waits[0] > waits[1] > waits[2]
    assert waits[1] == pytest.approx(waits[0] / 3, rel=1e-2)  # F = I = W: arXiv:2401.10241, table 1


@pytest.mark.parametrize("backward", [1.2, 2.0, 3.0])
@pytest.mark.parametrize(
    ("name", "virtual", "p", "m"),
    [
        *(("gpipe", 1, 4, m) for m in (1, 3, 8)),
        *(("1f1b", 1, 4, m) for m in (4, 8)),
        *(("zero-bubble", 1, p, m) for p, m in ((2, 1), (2, 4), (4, 1), (4, 2), (4, 8), (8, 3), (8, 16))),
        *(("interleaved", v, p, m) for v, p, m in ((2, 4, 1), (2, 4, 2), (2, 4, 8), (3, 4, 2), (3, 2, 4), (2, 8, 6))),
        *(("zbv", 2, p, 2 * p) for p in (2, 4, 8)),
    ],
)
def test_the_bubble_is_that_of_the_simulated_schedule(name, virtual, p, m, backward):
    found, ideal = pipeline(p, m, name, virtual, backward)
    each = ideal / m
    forward, half = each / (1 + backward) / virtual, each * backward / (1 + backward) / 2 / virtual
    stages = p * virtual
    parts = Times(*((s,) * stages for s in (forward, half, half)))
    seconds = simulate(schedule_of(name, p, virtual, m), parts).seconds
    assert found.bubble[0] == pytest.approx(seconds - ideal, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "virtual", "p", "m"),
    [
        *(("gpipe", 1, p, m) for p, m in ((2, 1), (4, 3), (4, 8))),
        *(("1f1b", 1, p, m) for p in (2, 3, 4) for m in range(p, 2 * p + 2)),
        *(("zero-bubble", 1, p, m) for p, m in ((2, 1), (3, 4), (4, 2), (4, 3), (4, 4), (4, 6), (4, 12))),
        *(("interleaved", v, p, m) for v, p, m in ((2, 4, 2), (2, 4, 4), (2, 4, 6), (2, 4, 8), (3, 2, 4), (2, 8, 10))),
        *(("zbv", 2, p, m) for p, m in ((2, 1), (3, 6), (4, 4), (4, 8), (4, 16), (8, 16))),
    ],
)
def test_messages_between_stages_add_what_they_do_to_the_simulated_schedule(name, virtual, p, m):
    found, ideal = pipeline(p, m, name, virtual, sent=1e6)
    each, stages, send = ideal / m / 3 / virtual, p * virtual, float(send_seconds(load("h100"), 1e6, False))
    one, other = (
        simulate(schedule_of(name, p, virtual, m), Times.equal(stages, each, each, each, seconds)).seconds
        for seconds in (0.0, send)
    )
    assert found.exposed["pp"][0] == pytest.approx(other - one, rel=1e-3)


@pytest.mark.parametrize(("slow", "share"), [(0.0, 1.0), (0.1, 0.99), (0.5, 0.99), (2.0, 0.99)])
def test_a_slower_stage_hides_the_messages_of_a_round(slow, share):
    """``slow``: how many messages longer it takes. In between the closed form is the least that a step can take."""
    p, m, send, each = 4, 16, 0.1, np.array([1.0, 1.0, 1.0, 1.0])
    each[1] += slow * send
    slack = (m - 1) * (each.max() - each.mean()) / send
    closed = m * each.max() + each.sum() - each.max() + send * hops(p, 1, np.array([m]), slack)[0][0]
    parts = Times(*(tuple(each / 3),) * 3, ((send, send),) * (p - 1))
    real = simulate(schedule_of("1f1b", p, 1, m), parts).seconds
    assert share * real - 1e-9 <= closed <= real + 1e-9


def test_activations_in_flight():
    assert pipeline(4, 8, "1f1b")[0].memory["activations"][0] == 12 * 4 * 7.0
    assert pipeline(4, 8, "gpipe")[0].memory["activations"][0] == 12 * 8 * 7.0
    more = pipeline(4, 8, "interleaved", 2)[0].memory["activations"][0]
    assert more == pytest.approx(12 * 4 * 7.0 * (1 + 3 / 8))  # arXiv:2205.05198, appendix: 1 + (p - 1) / (p v)
