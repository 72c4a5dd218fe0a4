import json
import re

import pytest
import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.describe import ROWS, RUNTIME, Describer, dtype_name, row_of
from autopar.ir.layout import I, P, R, plain_shard
from autopar.ir.names import fold, ranges
from autopar.ir.printer import FORMATS, print_program
from autopar.ir.program import Form
from tests.cli import programs


@pytest.mark.parametrize("format", FORMATS)
def test_formats(golden, format):
    golden(print_program(programs.model(), format=format), f"printer/layers.{format}")


def test_rank_shows_local_sizes(golden):
    golden(print_program(programs.model(), rank=1, block="layers.*"), "printer/rank1.text")


def test_traced_has_no_layouts(golden):
    program = programs.model()
    program.form = Form.TRACED
    for _, graph in program.graphs():
        for node in graph.nodes:
            node.meta.pop("layout", None)
    program.params = {n: type(p)(**{**vars(p), "layout": None}) for n, p in program.params.items()}
    golden(print_program(program), "printer/traced.text")


@pytest.mark.parametrize("format", FORMATS)
def test_printing_is_stable_and_leaves_the_program(format):
    program = programs.model()
    before = print_program(program, format=format)
    assert print_program(program.clone(), format=format) == before == print_program(program, format=format)
    assert "0x" not in before


def test_json_says_every_node():
    program = programs.model()
    read = json.loads(print_program(program, format="json"))
    for name, graph in program.graphs():
        assert [n["name"] for n in read["graphs"][name]] == [n.name for n in graph.nodes]
        assert len({n["name"] for n in read["graphs"][name]}) == len(read["graphs"][name])


def test_text_refers_only_to_names_that_it_defines():
    for part in print_program(programs.model()).split("\n\n")[2:]:
        defined = set()
        for line in part.splitlines():
            for name in re.findall(r"(%\d+)(?::| +=)", line):
                defined.add(name)
            assert set(re.findall(r"%\d+", line)) <= defined


def test_a_layer_whose_value_is_read_twice_is_not_folded():
    program = programs.model()
    calls = list(program.calls())
    hidden = next(iter(calls[0].users))
    with program.graph.inserting_before(next(n for n in program.graph.nodes if n.op == "output")):
        extra = program.graph.call_function(torch.ops.aten.neg.default, (hidden,))
    extra.meta = dict(hidden.meta)
    text = print_program(program)
    assert "layers.1-2" in text and "layers.0-2 " not in text and "layers.*(%1)\n" not in text
    assert text.count("layers.*(") == 2


@pytest.mark.parametrize(
    ("options", "slug"),
    [({"format": "xml"}, "unknown-format"), ({"block": "nope"}, "unknown-block"), ({"rank": 4}, "unknown-rank")],
)
def test_refusals(options, slug):
    with pytest.raises(AutoparError) as caught:
        print_program(programs.model(), **options)
    assert caught.value.slug == slug


def _convert(src, dst):
    graph = fx.Graph()
    x = programs.value(graph.placeholder("x"), (4, 8, 16), src)
    return programs.value(graph.call_function(ops.convert, (x, "tp", src, dst)), (4, 8, 16), dst)


S = plain_shard(1, 8, 2)
WHOLE = "1 KiB"  # 4 rows over dp=2, 8 tokens, 16 wide, 4 bytes


@pytest.mark.parametrize(
    ("src", "dst", "printed", "cost"),
    [
        (S, R, "all_gather(x, dim=1, tp)", WHOLE),
        (S, I, "all_gather(x, dim=1, tp, invariant)", WHOLE),
        (S, P, "zero_pad(x, dim=1, tp)", ""),
        (I, R, "replicate(x, tp)", f"backward {WHOLE}"),
        (I, S, "slice(x, dim=1, tp, invariant)", f"backward {WHOLE}"),
        (I, P, "keep_first(x, tp, invariant)", ""),
        (R, S, "slice(x, dim=1, tp)", ""),
        (R, I, "invariant(x, tp)", ""),
        (R, P, "keep_first(x, tp)", ""),
        (P, I, "all_reduce(x, tp, invariant)", WHOLE),
        (P, R, "all_reduce(x, tp)", WHOLE),
        (P, S, "reduce_scatter(x, dim=1, tp)", WHOLE),
        (S, plain_shard(2, 16, 2), "all_to_all(x, dim=1, dim=2, tp)", WHOLE),
    ],
)
def test_every_row_of_the_conversion_table(src, dst, printed, cost):
    node = _convert(src, dst)
    describer = Describer(programs.model(), {"dp": 0, "tp": 0})
    assert (describer.call(node), describer.cost(node)) == (printed, cost)


def test_runtime_functions_are_known_rows():
    from autopar.runtime import collectives

    for name, key in RUNTIME.items():
        node = fx.Graph().call_function(getattr(collectives, name))
        assert row_of(node) == ROWS[key]
    assert set(RUNTIME.values()) == set(ROWS)


def test_an_all_to_all_costs_the_same_once_local():
    from autopar.runtime import collectives

    graph = fx.Graph()
    x = programs.value(graph.placeholder("x"), (2, 4, 16), S)
    axis = graph.placeholder("tp")
    axis.meta["handle"] = "tp"
    out = plain_shard(2, 16, 2)
    node = programs.value(graph.call_function(collectives.all_to_all, (x, 1, 2, axis)), (2, 8, 8), out)
    program = programs.model()
    program.form = Form.LOCAL
    assert Describer(program, {"dp": 0, "tp": 0}).cost(node) == WHOLE


def _flops(target, shapes, out, **kwargs):
    graph = fx.Graph()
    args = [programs.value(graph.placeholder(f"a{i}"), s, I, I) for i, s in enumerate(shapes)]
    node = programs.value(graph.call_function(target, tuple(args), kwargs), out, I, I)
    return Describer(programs.model(), {"dp": 0, "tp": 0}).flops(node)


@pytest.mark.parametrize(
    ("target", "shapes", "out", "kwargs", "flops"),
    [
        (programs.aten.linear.default, [(3, 5), (7, 5)], (3, 7), {}, 2 * 3 * 5 * 7),
        (programs.aten.addmm.default, [(7,), (3, 5), (5, 7)], (3, 7), {}, 2 * 3 * 5 * 7),
        (programs.aten.bmm.default, [(2, 3, 5), (2, 5, 7)], (2, 3, 7), {}, 2 * 2 * 3 * 5 * 7),
        (programs.aten.convolution.default, [(1, 3, 8, 8), (4, 3, 2, 2)], (1, 4, 7, 7), {}, 2 * 196 * 12),
        (ops.attention, [(1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 3)], (1, 2, 4, 3), {}, 2 * 2 * 4 * 6 * (8 + 3)),
        (ops.attention, [(1, 2, 4, 8)] * 3, (1, 2, 4, 8), {"is_causal": True}, 2 * 4 * 4 * (8 + 8)),
        (programs.aten.add.Tensor, [(3, 5), (3, 5)], (3, 5), {}, 0),
    ],
)
def test_flops(target, shapes, out, kwargs, flops):
    assert _flops(target, shapes, out, **kwargs) == flops


def test_fold_joins_full_grids_only():
    grid = [(f"l.{i}.e.{j}.w", "a") for i in range(3) for j in range(2)]
    assert fold([*grid, ("head", "a")]) == [("l.0-2.e.0-1.w", "a"), ("head", "a")]
    assert fold(grid[:-1]) == [(n, f) for n, f in grid[:-1]]
    assert fold([("l.0.w", "a"), ("l.1.w", "b"), ("l.2.w", "a")]) == [("l.0,2.w", "a"), ("l.1.w", "b")]
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_dtype_names():
    assert [dtype_name(d) for d in (torch.bfloat16, torch.int64, torch.bool)] == ["bf16", "i64", "bool"]
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"
