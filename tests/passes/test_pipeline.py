"""Pipeline text and the runner."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.ir.layout import R
from autopar.ir.printer import print_program
from autopar.ir.program import Form, Program, copy_graph
from autopar.passes import pipeline
from autopar.passes.base import Context, Pass
from autopar.passes.data_parallel import DataParallel
from autopar.passes.localize import Localize
from autopar.passes.pipeline import PASSES, parse, run, unparse
from autopar.passes.reshard import Reshard
from autopar.passes.tensor_parallel import TensorParallel
from tests.passes.models import traced

FULL = "data-parallel,tensor-parallel,reshard,localize"
PASS = st.one_of(
    st.just(DataParallel()), st.builds(TensorParallel, sequence=st.booleans()), st.just(Reshard()), st.just(Localize())
)


def refused(text: str) -> AutoparError:
    with pytest.raises(AutoparError) as caught:
        parse(text)
    assert caught.value.slug == "bad-pipeline"
    return caught.value


@given(st.lists(PASS, min_size=1, max_size=6))
@settings(deadline=None, derandomize=True)
def test_text_round_trip(passes):
    text = unparse(passes)
    assert parse(text) == tuple(passes)
    assert unparse(parse(text)) == text
    spaced = text.replace(",", " , ").replace("{", " {")
    assert parse(spaced) == tuple(passes)


def test_names_are_kebab_case_and_their_own():
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) and p.name == name for name, p in PASSES.items())
    assert unparse([TensorParallel(sequence=True)]) == "tensor-parallel{sequence}"
    assert unparse([TensorParallel()]) == "tensor-parallel"
    assert parse("tensor-parallel{sequence=false}") == (TensorParallel(),)


@dataclass(frozen=True)
class Many(Pass):
    """Options of every kind."""

    name: ClassVar[str] = "many"
    on: bool = True
    count: int = 2
    word: str = "a"


@given(st.builds(Many, on=st.booleans(), count=st.integers(-9, 9), word=st.from_regex(r"\A[a-z:0-9+]+\Z")))
@settings(deadline=None, derandomize=True)
def test_options_of_every_kind(p):
    PASSES["many"] = Many
    try:
        assert parse(f"reshard,{p}") == (Reshard(), p)
    finally:
        del PASSES["many"]


@pytest.mark.parametrize(
    ("text", "at", "why"),
    [
        ("data-paralel", 0, "no pass 'data-paralel'"),
        ("data-parallel,shard", 14, "no pass 'shard'"),
        ("tensor-parallel{sequences}", 16, "no option 'sequences'"),
        ("reshard{x=1}", 8, "it has none"),
        ("", 0, "expected"),
        ("reshard,", 8, "expected"),
        ("reshard,,localize", 8, "expected"),
        ("reshard localize", 0, "expected"),
        ("tensor-parallel{sequence", 0, "expected"),
        ("reshard}", 0, "expected"),
        ("Reshard", 0, "expected"),
    ],
)
def test_errors_point_into_the_text(text, at, why):
    message = refused(text).message
    assert why in message
    line, caret = message.splitlines()[-2:]
    assert line == f"  {text}" and caret == f"  {' ' * at}^"


TRACED = traced("mlp", "dp=2,tp=2")


@pytest.mark.parametrize(
    "text",
    (
        "tensor-parallel",
        "reshard",
        "localize",
        "data-parallel,localize",
        "data-parallel,reshard,reshard",
        f"{FULL},localize",
    ),
)
def test_a_pass_out_of_place(text):
    with pytest.raises(AutoparError) as caught:
        run(TRACED, text)
    assert caught.value.slug == "wrong-form"


def test_passes_leave_the_program_that_they_are_given():
    before = print_program(TRACED)
    forms = [TRACED]
    run(TRACED, FULL, on_pass=lambda p, program, record: forms.append(program))
    texts = [print_program(f) for f in forms]
    run(TRACED, FULL)
    assert print_program(TRACED) == before == texts[0]
    assert [f.form for f in forms] == [Form.TRACED, Form.ANNOTATED, Form.ANNOTATED, Form.RESHARDED, Form.LOCAL]
    assert len(set(texts)) == 5


def test_it_stops_after_a_pass_and_records_each():
    records = []
    found = run(TRACED, FULL, after="reshard", on_pass=lambda p, program, record: records.append(record))
    assert found.form == Form.RESHARDED
    assert [r.text for r in records] == ["data-parallel", "tensor-parallel", "reshard"]
    assert records[0].before == records[1].after and records[2].after > records[2].before


@dataclass(frozen=True)
class Breaks(Pass):
    """A pass with a fault: the block's input is said to be R."""

    name: ClassVar[str] = "breaks"
    requires: ClassVar[Form] = Form.RESHARDED
    produces: ClassVar[Form] = Form.RESHARDED

    def rewrite(self, program: Program, context: Context) -> Program:
        node = next(n for n in program.graph.nodes if n.op == "placeholder" and "input" in n.meta)
        node.meta["diff"], node.meta["layout"] = True, node.meta["layout"].having("tp", R)
        return program


def test_the_runner_verifies_what_a_pass_makes_and_names_it():
    passes = [*parse("data-parallel,tensor-parallel,reshard"), Breaks()]
    with pytest.raises(AutoparError) as caught:
        run(TRACED, passes)
    assert "after pass breaks" in caught.value.message
    assert run(TRACED, passes, verify=False).form == Form.RESHARDED


def test_a_pass_whose_axis_the_mesh_lacks_leaves_the_program_as_it_was_checked(monkeypatch):
    checked, check = [], pipeline.check_program
    monkeypatch.setattr(
        pipeline, "check_program", lambda program, after: (checked.append(after), check(program, after))
    )
    forms, records = [], []
    text = "data-parallel,expert-parallel,tensor-parallel,context-parallel,reshard"
    run(TRACED, text, on_pass=lambda p, program, record: forms.append(program), records=records)
    assert checked == ["data-parallel", "tensor-parallel", "reshard"] and unparse(parse(text)) == text
    assert forms[1] is forms[0] and forms[3] is forms[2] and len({id(f) for f in forms}) == 3
    assert [r.text for r in records] == text.split(",")
    program = run(TRACED, "data-parallel")
    node = next(n for n in program.graph.nodes if n.op == "placeholder" and "input" in n.meta)
    node.meta["diff"], node.meta["layout"] = True, node.meta["layout"].having("tp", R)
    with pytest.raises(AutoparError, match="after pass context-parallel"):
        run(program, "context-parallel")


def test_copies_of_graphs_are_equal_and_apart():
    block = next(iter(TRACED.blocks.values())).graph if TRACED.blocks else TRACED.graph
    copy = copy_graph(block)
    copy.lint()
    pairs = list(zip(block.nodes, copy.nodes, strict=True))
    assert str(copy) == str(block) and all(a is not b and a.graph is block and b.graph is copy for a, b in pairs)
    assert all(a.meta == b.meta and a.meta is not b.meta for a, b in pairs)
    assert [len(a.users) for a, _ in pairs] == [len(b.users) for _, b in pairs]
    assert [*copy.find_nodes(op="placeholder")] == [b for _, b in pairs if b.op == "placeholder"]
    names, last = {n.name for n in copy.nodes}, [b for _, b in pairs if b.op == "call_function"][-1]
    with copy.inserting_after(last):
        new = copy.call_function(last.target, last.args, last.kwargs)
    assert new.name not in names and len(copy.nodes) == len(block.nodes) + 1
