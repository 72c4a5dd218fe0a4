"""The configurations that ``hf:`` names stand for; nothing of a model is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.presets import configuration


def configured(name: str) -> Mapping[str, Any]:
    """The configuration of a preset, a config.json or a folder with one.

    Raises AutoparError ``unknown-model``, ``unknown-preset``.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json":
        return configuration(name)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise AutoparError("unknown-model", f"{path}: cannot be read: {error}", "name a config.json") from error
