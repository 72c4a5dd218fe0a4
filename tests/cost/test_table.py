"""The comparison: what a reader and a program see of two strategies."""

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from autopar.cost import comparison, comparison_rows, load, price, to_csv, to_json, traffic_table
from autopar.cost.table import Rows, duration, size
from tests.cost.build import Sizes, layers


@pytest.fixture(scope="module")
def rows() -> Rows:
    hw = load("h100")
    return [
        ("tp", price(layers(Sizes()), hw)),
        ("sp", price(layers(Sizes(), sequence=True), hw)),
        ("one", price(layers(Sizes(t=1, d=1)), hw)),
    ]


def shown(table: object) -> str:
    console = Console(width=200, file=io.StringIO(), color_system=None)
    console.print(table)
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_table_has_a_line_a_strategy_and_a_column_an_axis(rows: Rows) -> None:
    table = comparison(rows)
    assert [c.header for c in table.columns] == [
        "strategy", "mesh", "TFLOP", "compute", "dp traffic", "tp traffic", "communication", "step", "memory", "states",
    ]  # fmt: skip
    assert table.row_count == 3
    text = shown(table)
    assert size(float(rows[0][1].wire_bytes("tp"))) in text
    assert "dp=2,tp=4" in text
    assert text.count(" *") == 1


def test_memory_that_does_not_fit_is_marked(rows: Rows) -> None:
    assert " !" not in shown(comparison(rows))
    assert " !" in shown(comparison([("small", replace(rows[0][1], capacity=10.0))]))


def test_traffic_lists_every_collective(rows: Rows) -> None:
    text = shown(traffic_table(rows[1][1]))
    for word in ("all_gather", "reduce_scatter", "all_reduce", "gradient", "forward", "backward"):
        assert word in text


def test_rows_are_plain_numbers_that_add_up(rows: Rows) -> None:
    for (_, p), row in zip(rows, comparison_rows(rows)):
        parts = [v for k, v in row.items() if k.startswith(("dp_", "tp_"))]
        assert sum(parts) == p.wire_bytes()
        assert row["step_seconds"] == pytest.approx(row["compute_seconds"] + row["communication_seconds"])
        assert all(isinstance(v, str | int | float) for v in row.values())
        assert 0 < row["mfu"] < 1


def test_json_and_csv_hold_the_same(rows: Rows) -> None:
    loaded = json.loads(to_json(rows))
    assert {c["collective"] for c in loaded[1]["traffic"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    lines = list(csv.DictReader(io.StringIO(to_csv(rows))))
    for line, row in zip(lines, loaded, strict=True):
        assert line["strategy"] == row["strategy"]
        assert float(line["step_seconds"]) == row["step_seconds"]
    assert float(lines[2]["tp_forward_bytes"]) == 0


def test_no_rows() -> None:
    assert comparison([]).row_count == 0
    assert comparison_rows([]) == []


def test_units() -> None:
    assert [size(n) for n in (0, 512, 1536, 64 * 2**20, 3 * 2**40)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "64.0 MiB",
        "3.0 TiB",
    ]
    assert [duration(s) for s in (0, 2.5, 3.2e-3, 4e-6, 5e-9)] == ["0", "2.50 s", "3.20 ms", "4.00 µs", "0.01 µs"]
