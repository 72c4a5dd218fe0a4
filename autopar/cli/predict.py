"""``autopar predict``: time and memory of runs whose architecture, layout and machine a csv file gives."""

import argparse
import csv
from pathlib import Path
from typing import Any

from autopar.cli.screen import Screen
from autopar.errors import AutoparError


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "predict",
        help="time and memory of the runs that a csv file lists",
        description="Add pred_ columns to ROWS: n_layers, hidden, ffn_hidden, heads, kv_heads, vocab, seq_len, gpu, "
        "tp, pp, dp, ... as in benchmarks/data. A row that cannot be priced says why in pred_error.",
    )
    parser.add_argument("rows", type=Path, metavar="ROWS", help="csv file")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="csv file to write (default: stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Write the rows with predictions; exit status 0."""
    from autopar.predict import COLUMNS, Predictor

    try:
        text = args.rows.read_text(encoding="utf-8")
    except OSError as error:
        raise AutoparError("unreadable-file", f"{args.rows}: {error.strerror}", "name a csv file") from None
    rows = list(csv.DictReader(text.splitlines()))
    if not rows:
        raise AutoparError("no-rows", f"{args.rows} has no rows", "a header and one line for each run")
    predictor = Predictor()
    with screen.working(f"predicting {len(rows)} rows"):
        found = [{**row, **predictor.predict(row)} for row in rows]
    columns = list(dict.fromkeys((*rows[0], *COLUMNS)))
    if args.output:
        with args.output.open("w", encoding="utf-8", newline="") as file:
            _write(file, columns, found)
    else:
        _write(screen.out.file, columns, found)
    failed = sum(bool(r["pred_error"]) for r in found)
    screen.say(f"{len(found) - failed} of {len(found)} rows predicted")
    return 0


def _write(file: Any, columns: list[str], rows: list[dict[str, str]]) -> None:
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
