"""Arguments that several commands share."""

import argparse
import re
from typing import Any

from autopar.errors import AutoparError
from autopar.ir.mesh import KNOWN_AXES


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, --seq and --padding."""
    parser.add_argument("model", metavar="MODEL", help="hf:NAME, hf:PATH/config.json, hf:FOLDER or module:callable")
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens of a row (default: what suits the model)")
    parser.add_argument("--padding", action="store_true", help="end the last row in padding, with a mask")


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """--mesh, --devices, --batch, --strategy and --passes."""
    words = f"as dp=2,tp=4; axes: {', '.join(KNOWN_AXES)}; with --strategy auto also a number of devices"
    parser.add_argument("--mesh", metavar="AXES", required=True, help=words)
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="of --strategy auto, where --mesh decides some axes"
    )
    parser.add_argument("--batch", type=positive, metavar="N", default=2, help="rows of each data rank (default 2)")
    parser.add_argument(
        "--strategy",
        metavar="K=V,...",
        default="",
        help="fields of Strategy, as sequence_parallel=true,strict=true; auto, or auto,zero=3: the fastest plan",
    )
    parser.add_argument("--passes", metavar="TEXT", help="pipeline text, as data-parallel,tensor-parallel,reshard")


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def whole(text: str) -> int:
    """An integer from 0 on, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def fields(text: str) -> dict[str, Any]:
    """``sequence_parallel=true,zero=3`` to Python values; a key alone is true. Raises AutoparError ``bad-strategy``."""
    out: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.partition("=")
        if not key.isidentifier() or (not value and "=" in part) or key in out:
            raise AutoparError("bad-strategy", f"{text!r}: cannot read {part!r}", "write field=value,field=value")
        out[key] = _value(value) if value else True
    return out


def _value(text: str) -> Any:
    known: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    if re.fullmatch(r"\d+\.\d*", text):
        return float(text)
    return int(text) if text.lstrip("-").isdigit() else text


def split_axes(text: str) -> tuple[str, dict[str, Any]]:
    """``tp=8,sequence_parallel=true`` to its mesh text (``tp=8``) and the strategy's fields."""
    given = fields(text)
    mesh = ",".join(f"{k}={v}" for k, v in given.items() if k in KNOWN_AXES)
    return mesh, {k: v for k, v in given.items() if k not in KNOWN_AXES}
