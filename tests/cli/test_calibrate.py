"""The profile that calibrate writes can be read, and clusters can be made of it."""

import pytest
import torch

from autopar import calibrate
from autopar.cli.main import main
from autopar.cost.hardware import load
from autopar.errors import AutoparError


@pytest.fixture
def quick(monkeypatch):
    """No processes: collectives with known numbers."""
    wire = {"all_reduce": 2e9, "other": 1e9, "latency": 1e-4}
    monkeypatch.setattr(calibrate, "collectives", lambda ranks: wire)


def test_a_measured_profile_is_a_profile(quick, tmp_path):
    path = tmp_path / "here.toml"
    assert main(["calibrate", "-o", str(path)]) == 0
    here = load(str(path))
    assert here.inner.rate("all_reduce") == pytest.approx(2e9)
    assert here.inner.rate("all_gather") == pytest.approx(1e9)
    assert here.flops_per_second(torch.float32) > 0 and 0 < here.matmul_efficiency <= 1
    assert load(f"{path}x16").ranks == 16


def test_the_fit_finds_the_curve_it_was_given(monkeypatch):
    def pretend(work, least=0.0):
        d = work.__defaults__[0].shape[0]
        return 2 * d**3 / (1e11 * (d / (d + 40)) ** 3)

    monkeypatch.setattr(calibrate, "seconds", pretend)
    peak, efficiency, half = calibrate.matmul()
    for d in calibrate.SQUARES:
        assert peak * efficiency * (d / (d + half)) ** 3 == pytest.approx(1e11 * (d / (d + 40)) ** 3, rel=0.05)


def test_a_file_that_is_not_there_is_no_profile():
    with pytest.raises(AutoparError) as error:
        load("nowhere.tomlx4")
    assert error.value.slug == "unknown-hardware"
