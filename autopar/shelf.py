"""What planning needs of a model, kept on disk: tracing it again would give the same.

A file holds text alone (``cost.stored``), nothing that runs when it is read. Its name is a hash of all that its content
depends on: configuration, hardware, precision and positions, autopar's own sources, and the versions of torch and
transformers. Files that were cut short or changed are passed over, and written again.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autopar.cost.closed import Family
from autopar.cost.hardware import Hardware
from autopar.cost.stored import from_data, to_data

ROOT = Path(__file__).parent
SHIPPED = ROOT / "presets" / "forms"
VARIABLE = "AUTOPAR_CACHE_DIR"
KEPT = 256  # files; the oldest go
BROKEN = (OSError, ValueError, KeyError, TypeError, IndexError)
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Known:
    """A model as planning sees it.

    Args:
        families: of its layouts. title: class and size, for people. positions: of a row, what suits the model or was
            asked for. width: bytes of an element of its parameters. sequential: whether rows have positions. notes:
            what tracing it warned of.
    """

    families: tuple[Family, ...]
    title: str
    positions: int
    width: int
    sequential: bool
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """As JSON."""
        about = {n: v for n, v in vars(self).items() if n != "families"}
        return json.dumps({**about, **to_data(self.families)}, separators=(",", ":"))

    @staticmethod
    def of(text: str) -> "Known":
        """From ``text``. Raises one of ``BROKEN`` for anything else."""
        data = json.loads(text)
        families = from_data(data)
        notes = tuple(map(str, data["notes"]))
        return Known(families, data["title"], data["positions"], data["width"], data["sequential"], notes)


def folder() -> Path | None:
    """``$AUTOPAR_CACHE_DIR``, else ``autopar`` in the user's folder for caches; None where the variable is empty."""
    said = os.environ.get(VARIABLE)
    if said is not None:
        return Path(said) if said else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "autopar"


def key(configuration: Mapping[str, Any], machine: Hardware, precision: str, positions: int | None) -> str:
    """The name of what is known of a configuration on a profile; the number of devices does not enter."""
    asked = {
        "configuration": configuration, "machine": repr(replace(machine, ranks=0)), "precision": precision,
        "positions": positions, "sources": sources(), "packages": packages(),
    }  # fmt: skip
    return _hash(json.dumps(asked, sort_keys=True, default=str))


def recall(name: str) -> Known | None:
    """What was kept under a name; None where nothing was, or where it is not what was written."""
    place = folder()
    if place is None:
        return None
    try:
        digest, _, text = (place / f"{name}.json").read_text(encoding="utf-8").partition("\n")
        return Known.of(text) if digest == _hash(text) else None
    except BROKEN:
        return None


def shipped(configuration: Mapping[str, Any], machine: Hardware, precision: str, positions: int | None) -> Known | None:
    """What came with autopar (``benchmarks/forms.py`` makes it); None where it is of other sources or another question.

    It is of the sources that were loaded when it was made, and of the same torch, transformers, configuration and
    profile; bf16, and the positions that suit the model.
    """
    if precision != "bf16" or positions is not None:
        return None
    try:
        made = json.loads((SHIPPED / "made.json").read_text(encoding="utf-8"))
        same = made["sources"] == sources_of(made["files"]) and made["packages"] == packages()
        entry = json.loads((SHIPPED / f"{name_of(configuration)}.json").read_text(encoding="utf-8")) if same else {}
        at = entry.get("machines", {}).get(name_of(repr(replace(machine, ranks=0))))
        return None if at is None else Known.of(json.dumps(entry["known"][at]))
    except BROKEN:
        return None


def name_of(value: Any) -> str:
    """A short hash of a configuration, or of text."""
    return _hash(json.dumps(value, sort_keys=True, default=str))[:16]


def packages() -> dict[str, str]:
    """The versions of what a trace depends on besides, whatever device they were built for."""
    return {name: _version(name).partition("+")[0] for name in PACKAGES}


def keep(name: str, known: Known) -> str | None:
    """Keep it under a name, at once or not at all; why not, where the folder cannot be written."""
    place, text = folder(), known.text()
    if place is None:
        return None
    try:
        place.mkdir(parents=True, exist_ok=True)
        _write(place / f"{name}.json", f"{_hash(text)}\n{text}")
        _forget(place)
    except OSError as error:
        return f"{place}: {error.strerror}; set {VARIABLE} to another folder, or to nothing"
    return None


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _forget(place: Path) -> None:
    """Remove the oldest files beyond ``KEPT``."""
    found = sorted(place.glob("*.json"), key=lambda p: p.stat().st_mtime)
    for path in found[:-KEPT]:
        path.unlink(missing_ok=True)


@cache
def sources(root: Path = ROOT) -> str:
    """A hash of every file of the package that may change an answer."""
    return sources_of([str(path.relative_to(root)) for path in _files(root)], root)


def sources_of(files: Sequence[str], root: Path = ROOT) -> str:
    """A hash of some of them. Raises OSError where one is missing."""
    whole = hashlib.sha256()
    for name in files:
        whole.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return whole.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for folder_, inner, names in os.walk(root, followlinks=True):  # passes and cost are links in a checkout
        inner.sort()
        yield from (Path(folder_) / n for n in sorted(names) if n.endswith((".py", ".toml")))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
