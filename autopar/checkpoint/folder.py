"""Checkpoint folders: which are complete, which is the newest, and putting one in its place."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError

MANIFEST, TRAINING, METADATA = "autopar.json", "training.pt", ".metadata"
FORMAT = 1
_STEP = re.compile(r"step-(\d+)")


def write(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_name(f".part-{path.name}")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def sign(folder: Path, token: str, step: int | None) -> None:
    """Write the manifest, which makes the folder complete: the size of every file, and hashes of the small ones."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        files[path.name] = {"bytes": path.stat().st_size}
        if path.name in (METADATA, TRAINING):
            files[path.name]["blake2b"] = _hash(path)
    manifest = {"format": FORMAT, "token": token, "step": step, "files": files}
    write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def _hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def token_of(folder: Path) -> str | None:
    """Which save made the folder; None where it is not complete."""
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["token"])
    except (OSError, ValueError, KeyError):
        return None


def fault(folder: Path) -> str | None:
    """Why the folder is no complete checkpoint; None where it is one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, files = manifest["format"], dict(manifest["files"])
    except FileNotFoundError:
        return f"has no {MANIFEST}, which is written last" if folder.is_dir() else "does not exist"
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if version != FORMAT:
        return f"has format {version}; this version reads {FORMAT}"
    for name, said in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != said["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {said['bytes']}"
        if "blake2b" in said and _hash(path) != said["blake2b"]:
            return f"{name} was changed"
    return None


def step_folder(parent: str | os.PathLike[str], step: int) -> Path:
    """The folder for a step in a series of checkpoints, ``parent/step-N``: ``load(parent)`` takes the newest."""
    return Path(parent) / f"step-{step}"


def is_step(path: Path) -> bool:
    """Whether the folder is named as one of a series."""
    return _STEP.fullmatch(path.name) is not None


def steps(parent: Path) -> list[Path]:
    """The series' folders, newest first, complete or not."""
    found = [(int(m[1]), p) for p in parent.iterdir() if (m := _STEP.fullmatch(p.name))] if parent.is_dir() else []
    return [p for _, p in sorted(found, reverse=True)]


def latest(parent: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint among ``parent/step-N``; None where there is none."""
    return next((p for p in steps(Path(parent)) if fault(p) is None), None)


def find(folder: str | os.PathLike[str]) -> Path:
    """The complete checkpoint that ``folder`` is, or the newest in it.

    Raises:
        AutoparError: ``incomplete-checkpoint`` where it holds none, or was not finished.
    """
    path = Path(folder)
    why = fault(path)
    if why is None:
        return path
    aside = [p for p in _beside(path) if not path.exists() and fault(p) is None]
    found = latest(path) or next(iter(sorted(aside, key=lambda p: p.name.endswith(".old"))), None)
    if found is not None:
        return found
    newest = "".join(f"; {p.name}: {fault(p)}" for p in steps(path)[:1])
    whole = latest(path.parent) if is_step(path) else None
    fix = f"load {whole}, the newest that is whole" if whole else "load a checkpoint that was saved whole"
    raise AutoparError("incomplete-checkpoint", f"{path}: {why}{newest}", fix)


def _beside(path: Path) -> list[Path]:
    """What saves into ``path`` left beside it."""
    named = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.(saving|old)")
    return [p for p in path.parent.iterdir() if named.fullmatch(p.name)] if path.parent.is_dir() else []


def working(path: Path, token: str) -> Path:
    """Where a save collects its files."""
    return path.with_name(f".{path.name}.{token}.saving")


def put(path: Path, token: str) -> None:
    """Make the finished working folder the one at ``path``, and remove what earlier saves left.

    Where ``path`` exists it is set aside first: a process that dies between leaves it there, and ``find`` knows it.
    """
    old = path.with_name(f".{path.name}.{token}.old")
    if path.exists():
        path.replace(old)
    working(path, token).replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    for leftover in _beside(path):
        shutil.rmtree(leftover, ignore_errors=True)  # the checkpoint is in its place; rubbish is no failure


def prune(parent: Path, keep: int) -> None:
    """Remove all complete checkpoints of a series but the ``keep`` newest, and what broke off before them."""
    complete = [p for p in steps(parent) if fault(p) is None]
    for path in steps(parent):
        if complete[keep - 1 :] and int(path.name[5:]) < int(complete[keep - 1].name[5:]):
            gone = path.with_name(f".{path.name}.0.old")
            path.replace(gone)
            shutil.rmtree(gone, ignore_errors=True)
