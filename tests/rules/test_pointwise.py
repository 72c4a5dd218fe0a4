"""Ops that torch itself tags as element by element: each one that can be called is executed on shards."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from autopar.ir.layout import Shard
from autopar.rules.strategies import strategies
from autopar.rules.table import TABLE, has_rule
from tests.rules.execute import Op, check
from tests.rules.samples import Random

WAYS = 2
PARAMETERS = {"Scalar": 1.0, "float": 1.0, "int": 1, "bool": False, "number": 1}
SPECIAL = {"masked_fill": {1: "bool"}, "native_dropout_backward": {1: "bool"}}  # tensors of another dtype
GIVEN = {"clamp": {"min": 0.3}, "clip": {"max": 0.5}, "round": {"decimals": 1}, "div": {"rounding_mode": "floor"}}
HALF = {"igamma", "igammac", "logit_backward", "silu_backward"}  # without a derivative in every argument


def tagged() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            returns = [str(r.type) for r in op._schema.returns]
            if (
                torch.Tag.pointwise in op.tags
                and not op._schema.is_mutable
                and set(returns) == {"Tensor"}
                and name not in HALF
            ):
                yield op


def call(op: Any, kind: str, broadcast: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by the schema, tensors of one kind of dtype, broadcast against each other."""
    r, args, name = Random(1), [], op._schema.name.split("::")[1]
    shapes = [(6, 4), (4,), (6, 1)] if broadcast else [(6, 4)] * 3
    make = {"float": r.positive, "int": lambda *s: r.ints(3, *s) + 1, "bool": r.bools}
    known = {a.name for a in op._schema.arguments}
    kwargs = {k: v for k, v in GIVEN.get(name, {}).items() if k in known and "Tensor" not in op._overloadname}
    if "rounding_mode" in known:
        kwargs = GIVEN["div"]
    for i, arg in enumerate(op._schema.arguments):
        word = str(arg.type).removeprefix("Optional[").removesuffix("]")
        if word == "Tensor":
            args.append(make[SPECIAL.get(name, {}).get(i, kind)](*shapes[min(i, 2)]))
        elif not arg.has_default_value() and arg.name not in kwargs:
            args.append(PARAMETERS[word])
    return tuple(args), kwargs


def example(op: Any) -> Op:
    """The op on the first dtypes and shapes that it takes."""
    refused = []
    for kind, broadcast in product(("float", "int", "bool"), (True, False)):
        args, kwargs = call(op, kind, broadcast)
        try:
            return Op.of(op, args, kwargs)
        except RuntimeError as error:
            refused.append(str(error))
    raise AssertionError(f"{op} cannot be called: {refused}")


@pytest.mark.parametrize("op", [op for op in tagged() if op not in TABLE], ids=str)
def test_tagged(op: Any) -> None:
    assert has_rule(op)
    made = example(op)
    sharded = 0
    for a in strategies(made.node, made.candidates(WAYS)):
        check(made, a, WAYS)
        sharded += any(isinstance(t, Shard) for t in a.outputs)
    assert sharded >= 2
