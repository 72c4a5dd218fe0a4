"""Profiles of devices and their links, read from TOML files in which every number has a unit and a source."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError

UNITS = {
    "FLOP/s": 1.0,
    "GFLOP/s": 1e9,
    "TFLOP/s": 1e12,
    "B/s": 1.0,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "GB": 1e9,
    "GiB": 2.0**30,
    "s": 1.0,
    "us": 1e-6,
    "fraction": 1.0,
    "elements": 1.0,
    "ranks": 1.0,
}

WIDE = 128  # elements of a head, beyond which attention kernels work in smaller tiles
HOST_MEMORY = 256e9  # bytes of host memory for a device, where a profile does not say

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Tier:
    """Links among the ranks of one domain: a node, or the network between nodes.

    Args:
        bandwidth: bytes per second and rank, one direction, nominal.
        efficiency: share of ``bandwidth`` that each collective reaches for large messages.
        latency: seconds for each step of a collective.
        base: seconds for starting a collective.
        steps: seconds for each step of those collectives whose steps take another time.
    """

    bandwidth: float
    efficiency: Mapping[str, float]
    latency: float
    base: float
    steps: Mapping[str, float] = field(default_factory=dict)

    def step(self, collective: str) -> float:
        """Seconds for a step of ``collective``."""
        return self.steps.get(collective, self.latency)

    def rate(self, collective: str) -> float:
        """Bytes per second and rank that ``collective`` reaches; entry ``other`` serves those not named."""
        return self.bandwidth * self.efficiency.get(collective, self.efficiency["other"])


@dataclass(frozen=True)
class Hardware:
    """A device and its links. Seconds, bytes, flops.

    Args:
        peak: matmul flops per second by name of dtype, dense, without reduced-precision shortcuts.
        memory_bytes: capacity. memory_bandwidth: bytes per second, nominal; ``memory_efficiency`` of it is reached.
        matmul_efficiency: share of ``peak`` that a large matmul reaches.
        matmul_half: size of a dim at which a matmul reaches half of that, in elements (``compute.efficiency``).
        attention_efficiency: share of ``peak`` that fused attention reaches, (forward, backward); ``wide_heads``: share
            of that where heads have more than 128 elements. rows: share of what memory reaches where rows are sorted.
        node: ranks that share the inner tier. ranks: of the whole cluster, 0 where not said.
        host: seconds that a rank spends on each op besides its work. unit: the same for each unit of parameters that an
            engine gathers or reduces. overlap: share of compute behind which collectives can hide.
        host_memory: bytes of a node's host; where a profile does not say, 256 GB for each of its ranks, about what a
            DGX H100 has.
    """

    name: str
    peak: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    memory_efficiency: float
    matmul_efficiency: float
    matmul_half: float
    attention_efficiency: tuple[float, float]
    node: int
    inner: Tier
    outer: Tier
    ranks: int = 0
    host: float = 0.0
    unit: float = 0.0
    overlap: float = 1.0
    wide_heads: tuple[float, float] = (1.0, 1.0)
    rows: float = 1.0
    host_memory: float = math.inf

    def attention(self, heads: Sequence[object]) -> tuple[float, float]:
        """Share of peak that attention reaches, forward and backward; ``heads``: sizes of its queries and values."""
        wide = any(isinstance(size, Real) and float(size) > WIDE for size in heads)
        (forward, backward), share = self.attention_efficiency, self.wide_heads if wide else (1.0, 1.0)
        return forward * share[0], backward * share[1]

    def flops_per_second(self, dtype: object) -> float:
        """Peak for a dtype or its name; complex as its parts, integers as fp32. Raises AutoparError ``no-peak``."""
        name = dtype_name(dtype)
        if "float" not in name:
            name = "float64" if name == "complex128" else "float32"
        if name in self.peak:
            return self.peak[name]
        raise AutoparError("no-peak", f"hardware {self.name}: no peak for {name}", f"use one of {', '.join(self.peak)}")


def dtype_name(dtype: object) -> str:
    """``bfloat16`` for ``torch.bfloat16``, or for itself."""
    return str(dtype).removeprefix("torch.")


def names() -> tuple[str, ...]:
    """The profiles that exist."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.toml")))


def of_device(name: str) -> str | None:
    """The profile of a device by the name that its driver gives ("NVIDIA H100 80GB HBM3"); None where there is none.

    Variants with another peak ("H100 PCIe", "H100 NVL") have none.
    """
    said = re.sub(r"[^a-z0-9]", "", name.lower())
    if "pcie" in said or "nvl" in said:
        return None
    found = [p for p in names() if all(word in said for word in p.split("-"))]
    return max(found, key=len, default=None)


def load(text: str) -> Hardware:
    """A profile by name (``h100``) or path (``here.toml``), or a cluster of one (``h100x64``: 64 ranks).

    Raises AutoparError ``unknown-hardware``.
    """
    match = re.fullmatch(r"(.+)x([1-9]\d*)", text)
    name, ranks = (match[1], int(match[2])) if match and text not in names() else (text, 0)
    if name in names():
        return replace(_profile(name), ranks=ranks)
    if name.endswith(".toml") and Path(name).is_file():
        return replace(read(Path(name)), ranks=ranks)
    known = ", ".join(names())
    raise AutoparError(
        "unknown-hardware", f"hardware {text!r} is not known", f"one of {known}, a FILE.toml, or either with xRANKS"
    )


def read(path: Path) -> Hardware:
    """A profile from a TOML file. Raises AutoparError ``bad-hardware`` for a number without unit or source."""
    raw = tomllib.loads(path.read_text())
    for place, entry in numbers(raw):
        _check(path.name, place, entry)
    try:
        return _build(path.stem, raw)
    except KeyError as missing:
        message = f"{path.name}: {missing.args[0]} is missing"
        raise AutoparError("bad-hardware", message, "see the other profiles") from None


def numbers(raw: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, entry) of each leaf of a profile: a table with ``value``, or what stands in its place."""
    if not isinstance(raw, dict) or "value" in raw:
        yield place, raw
        return
    for key, inner in raw.items():
        yield from numbers(inner, f"{place}.{key}" if place else key)


@cache
def _profile(name: str) -> Hardware:
    return read(_FOLDER / f"{name}.toml")


def _check(file: str, place: str, entry: Any) -> None:
    if not isinstance(entry, dict) or not str(entry.get("source", "")).strip() or entry.get("unit") not in UNITS:
        fix = f"write {place} = {{ value, unit, source }} with a unit among {', '.join(UNITS)}"
        raise AutoparError("bad-hardware", f"{file}: {place} lacks a value, a known unit or a source", fix)
    if not isinstance(entry["value"], int | float) or entry["value"] < 0:
        raise AutoparError("bad-hardware", f"{file}: {place} is {entry['value']!r}", "a number of at least 0")


def _number(entry: Mapping[str, Any]) -> float:
    return float(entry["value"]) * UNITS[entry["unit"]]


def _share(raw: Mapping[str, Any], name: str) -> float:
    return _number(raw[name]) if name in raw else 1.0


def _tier(raw: Mapping[str, Any]) -> Tier:
    efficiency = {name: _number(entry) for name, entry in raw["efficiency"].items()}
    if "other" not in efficiency:
        raise KeyError("efficiency.other")
    steps = {name: _number(entry) for name, entry in raw.get("steps", {}).items()}
    return Tier(_number(raw["bandwidth"]), efficiency, _number(raw["latency"]), _number(raw["base"]), steps)


def _build(name: str, raw: Mapping[str, Any]) -> Hardware:
    memory, matmul, attention = raw["memory"], raw["matmul"], raw["attention"]
    host = {key: _number(entry) for key, entry in raw.get("host", {}).items()}
    return Hardware(
        name=name,
        peak={dtype: _number(entry) for dtype, entry in raw["peak"].items()},
        memory_bytes=_number(memory["capacity"]),
        memory_bandwidth=_number(memory["bandwidth"]),
        memory_efficiency=_number(memory["efficiency"]),
        matmul_efficiency=_number(matmul["efficiency"]),
        matmul_half=_number(matmul["half"]),
        attention_efficiency=(_number(attention["forward"]), _number(attention["backward"])),
        node=int(_number(raw["node"])),
        inner=_tier(raw["inner"]),
        outer=_tier(raw["outer"]),
        wide_heads=(_share(attention, "wide_forward"), _share(attention, "wide_backward")),
        rows=_share(memory, "rows"),
        host=host.get("op", 0.0),
        unit=host.get("unit", 0.0),
        overlap=host.get("overlap", 1.0),
        host_memory=host.get("memory", HOST_MEMORY * _number(raw["node"])),
    )
