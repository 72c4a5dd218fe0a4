import pytest

from autopar.rules.notation import labels, parse


@pytest.mark.parametrize(
    "text", ["b i, i o", "a -> b -> c", "a, [b -> c", "a, b] -> c", "a* -> a", "[+o -> o", "a; b -> c"]
)
def test_what_does_not_read_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match="rule") as caught:
        parse(text)
    assert repr(text) in str(caught.value)


def test_operands():
    rule = parse("b.. i, !o i, [+o] -> b.. o")
    assert [o.factors for o in rule.inputs] == [("b..", "i"), ("o", "i"), ("o",)]
    assert [o.optional for o in rule.inputs] == [False, False, True]
    assert [o.added for o in rule.inputs] == [False, False, True]
    assert rule.blocked == {"o"} and rule.outputs[0].factors == ("b..", "o")
    assert parse("-> !s").inputs == () and parse("->").outputs[0].factors == ()


LINEAR = "b.. i, o i, [+o] -> b.. o"


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "wanted_in", "wanted_out", "blocked"),
    [
        (LINEAR, [(2, 3, 4), (5, 4)], [(2, 3, 5)], (("b1", "b0", "i"), ("o", "i")), (("b1", "b0", "o"),), set()),
        (LINEAR, [(4,), (5, 4), (5,)], [(5,)], (("i",), ("o", "i"), ("o",)), (("o",),), set()),
        ("n.. v, n.. -> n..", [(2, 3, 9), (2, 3)], [(2, 3)], (("n1", "n0", "v"), ("n1", "n0")), (("n1", "n0"),), set()),
        ("b.., b.. -> b..", [(2, 3), (3,)], [(2, 3)], (("b1", "b0"), ("b0",)), (("b1", "b0"),), set()),
        ("b.., b.. -> b..", [(2, 1), (2, 3)], [(2, 3)], (("b1", None), ("b1", "b0")), (("b1", "b0"),), set()),
        ("b.. !c -> b..", [(2, 3, 2)], [(2, 3)], (("b1", "b0", "c"),), (("b1", "b0"),), {"c"}),
        ("v h, !t.. -> t.. h", [(9, 4), (2, 3)], [(2, 3, 4)], (("v", "h"), ("t1", "t0")), (("t1", "t0", "h"),),
            {"t0", "t1"}),
        ("-> !s", [], [(6,)], (), (("s",),), {"s"}),
        ("i, i -> ", [(3,), (3,)], [()], (("i",), ("i",)), ((),), set()),
    ],
)  # fmt: skip
def test_binding(text, inputs, outputs, wanted_in, wanted_out, blocked):
    found = labels(text, inputs, outputs)
    assert (found.inputs, found.outputs, found.blocked) == (wanted_in, wanted_out, frozenset(blocked))


def test_added_counts_operands_that_are_there():
    assert labels(LINEAR, [(3, 4), (5, 4), (5,)], [(3, 5)]).added == {2}
    assert labels(LINEAR, [(3, 4), (5, 4)], [(3, 5)]).added == frozenset()


def test_too_few_operands_are_a_fault_of_the_table():
    with pytest.raises(AssertionError):
        labels(LINEAR, [(3, 4)], [(3, 5)])
