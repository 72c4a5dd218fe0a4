"""Profiles: every number has a unit and a source, and names and files that are wrong are refused."""

import tomllib
from pathlib import Path

import pytest
import torch

from autopar.cost import hardware
from autopar.errors import AutoparError

FOLDER = Path(hardware.__file__).parent


def test_the_profiles_that_are_promised_exist() -> None:
    wanted = {"a100-80g", "h100", "h200", "b200", "gb200", "h800", "mi300x", "cpu"}
    assert wanted <= set(hardware.names())


@pytest.mark.parametrize("name", hardware.names())
def test_every_number_has_unit_and_source(name: str) -> None:
    leaves = list(hardware.numbers(tomllib.loads((FOLDER / f"{name}.toml").read_text())))
    assert len(leaves) >= 17
    for place, entry in leaves:
        assert set(entry) == {"value", "unit", "source"}, place
        assert entry["unit"] in hardware.UNITS, place
        assert len(entry["source"]) > 5, place


def test_a_profile_that_says_nothing_of_its_host_has_the_usual_memory(tmp_path: Path) -> None:
    text = (FOLDER / "h100.toml").read_text()
    (tmp_path / "mine.toml").write_text(text[: text.index("[host]")])
    assert hardware.load(f"{tmp_path}/mine.toml").host_memory == 8 * hardware.HOST_MEMORY
    assert hardware.load("h100").host_memory == 2e12


@pytest.mark.parametrize("name", hardware.names())
def test_orders_of_magnitude(name: str) -> None:
    """A slip in a unit is off by a thousand."""
    hw = hardware.load(name)
    assert 1e10 < hw.peak["float64"] <= hw.peak["float32"] <= hw.peak["bfloat16"] < 1e16
    assert 1e9 <= hw.outer.bandwidth <= hw.inner.bandwidth < hw.memory_bandwidth < 1e13
    assert 4e9 < hw.memory_bytes < 1e12
    assert 0.9 <= hw.host_memory / (hw.node * hw.memory_bytes) < 10
    assert all(0 < e <= 1 for t in (hw.inner, hw.outer) for e in t.efficiency.values())
    assert 0 < hw.matmul_efficiency <= 1 and 0 <= hw.inner.latency <= hw.outer.latency < 1e-3


def test_known_values_in_base_units() -> None:
    hw = hardware.load("a100-80g")
    assert hw.peak["bfloat16"] == 312e12
    assert hw.memory_bytes == 80e9
    assert hw.inner.bandwidth == 300e9
    assert hw.outer.efficiency["other"] == 0.9
    assert hw.outer.latency == pytest.approx(14e-6)


def test_cluster_text() -> None:
    assert hardware.load("h100x64").ranks == 64
    assert hardware.load("a100-80gx8").name == "a100-80g"
    assert hardware.load("h100").ranks == 0


@pytest.mark.parametrize("text", ["h1000", "h100x0", "x8", "", "../h100"])
def test_unknown_names(text: str) -> None:
    with pytest.raises(AutoparError) as error:
        hardware.load(text)
    assert error.value.slug == "unknown-hardware"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('unit = "TB/s"', 'unit = "TB"'),
        ('source = "arXiv', 'origin = "arXiv'),
        ("value = 312,", 'value = "312",'),
        ("[outer]", "[other]"),
    ],
)
def test_bad_files(tmp_path: Path, old: str, new: str) -> None:
    text = (FOLDER / "a100-80g.toml").read_text()
    assert old in text
    (tmp_path / "mine.toml").write_text(text.replace(old, new))
    with pytest.raises(AutoparError) as error:
        hardware.read(tmp_path / "mine.toml")
    assert error.value.slug == "bad-hardware"


def test_dtypes_without_a_peak() -> None:
    hw = hardware.load("h100")
    assert hw.flops_per_second(torch.int64) == hw.flops_per_second(torch.complex64) == hw.peak["float32"]
    with pytest.raises(AutoparError) as error:
        hw.flops_per_second(torch.float8_e4m3fn)
    assert error.value.slug == "no-peak"
