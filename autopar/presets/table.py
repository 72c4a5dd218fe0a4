"""The presets by name."""

import json
from importlib.resources import files
from typing import Any

from autopar.errors import AutoparError
from autopar.presets.shrink import tiny

TINY = "-tiny"


def _read(name: str) -> Any:
    return json.loads(files("autopar.presets").joinpath(f"{name}.json").read_text(encoding="utf-8"))


def aliases() -> dict[str, str]:
    """Short family names and the preset that each stands for."""
    return dict(_read("aliases"))


def names() -> list[str]:
    """The presets, without ``-tiny`` variants and aliases, sorted."""
    found = (f.name for f in files("autopar.presets").iterdir())
    return sorted(f.removesuffix(".json") for f in found if f.endswith(".json") and f != "aliases.json")


def configuration(name: str) -> dict[str, Any]:
    """The configuration of a preset, an alias, or the ``-tiny`` variant of either, as the keys of a config.json.

    Raises AutoparError ``unknown-preset``.
    """
    base = name.removesuffix(TINY)
    base = aliases().get(base, base)
    if base not in names():
        raise AutoparError(
            "unknown-preset",
            f"hf:{name}: no preset, config.json or folder of this name",
            f"presets: {', '.join(names())} (each also as NAME{TINY}); short names: {', '.join(aliases())}",
        )
    config = _read(base)
    return tiny(config) if name.endswith(TINY) else config
