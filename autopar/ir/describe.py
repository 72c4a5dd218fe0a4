"""How one node reads: its op, arguments, type and cost. Shared by the text, JSON and DOT printers."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir import ops
from autopar.ir.grouped import body_text
from autopar.ir.layout import Layout, Shard, format_dims, local_shape
from autopar.ir.program import Form, Program, Spec, specs, tensor_args

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of the conversion table: the collective's printed name, a mark, and which of its halves moves bytes."""

    name: str
    mark: str = ""
    forward: bool = False
    backward: bool = False


# Keyed by the letters of the source and the destination type.
ROWS = {
    "SR": Row("all_gather", "", True, True),
    "SI": Row("all_gather", "invariant", True),
    "SP": Row("zero_pad"),
    "IR": Row("replicate", "", False, True),
    "IS": Row("slice", "invariant", False, True),
    "IP": Row("keep_first", "invariant"),
    "RS": Row("slice"),
    "RI": Row("invariant"),
    "RP": Row("keep_first"),
    "PI": Row("all_reduce", "invariant", True),
    "PR": Row("all_reduce", "", True, True),
    "PS": Row("reduce_scatter", "", True, True),
    "SS": Row("all_to_all", "", True, True),
}
# The functions of the runtime that LOCAL programs call, and the row that each implements.
RUNTIME = {
    "all_gather": "SR", "all_gather_invariant": "SI", "shard_to_partial": "SP", "to_replicated": "IR",
    "slice_invariant": "IS", "invariant_to_partial": "IP", "slice_replicated": "RS", "to_invariant": "RI",
    "replicated_to_partial": "RP", "all_reduce_invariant": "PI", "all_reduce": "PR", "reduce_scatter": "PS",
    "all_to_all": "SS",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16`` for ``torch.bfloat16``."""
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def op_name(node: fx.Node) -> str:
    """The op's short name: ``linear`` for ``aten.linear.default``, the function's name else."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def row_of(node: fx.Node) -> Row | None:
    """The conversion that the node is, if it is one."""
    if node.target is ops.convert:
        _, _, src, dst = convert_args(node)
        return ROWS[str(src)[0] + str(dst)[0]]
    if getattr(node.target, "__module__", "").startswith("autopar.runtime"):
        key = RUNTIME.get(op_name(node))
        return ROWS[key] if key else None
    return None


def convert_args(node: fx.Node) -> tuple[fx.Node, str, Any, Any]:
    """(value, axis, source type, destination type) of a ``convert`` node."""
    given = dict(zip(("x", "axis", "src", "dst"), node.args)) | dict(node.kwargs)
    return given["x"], given["axis"], given["src"], given["dst"]  # type: ignore[return-value]


def axis_of(node: fx.Node) -> str:
    """The mesh axis of a conversion, or of the runtime function that implements one."""
    if node.target is ops.convert:
        return convert_args(node)[1]
    return next(str(a.meta["handle"]) for a in node.all_input_nodes if "handle" in a.meta)


def _layouts(node: fx.Node) -> tuple[Layout, ...]:
    found = node.meta.get("layout")
    return found if isinstance(found, tuple) else (found or Layout(),) * len(specs(node))


@dataclass
class Describer:
    """Names and describes the nodes of one graph of a program.

    Args:
        program: the program.
        at: coordinates of the rank whose sizes are counted.
        local: whether types show that rank's sizes instead of the global ones.
        names: the printed name of each node that has one.
    """

    program: Program
    at: Mapping[str, int]
    local: bool = False
    names: dict[fx.Node, str] = field(default_factory=dict)

    def shape(self, spec: Spec, layout: Layout) -> tuple[int, ...]:
        """The rank's own shape of a value."""
        if self.program.form >= Form.LOCAL:
            return spec.shape
        return local_shape(spec.shape, layout, self.program.mesh, self.at)

    def shapes(self, node: fx.Node) -> list[tuple[int, ...]]:
        """The rank's own shapes of what the node returns, values that are no tensors left out."""
        return [self.shape(s, w) for s, w in zip(specs(node), _layouts(node)) if isinstance(s, Spec)]

    def type(self, node: fx.Node) -> str:
        """``bf16[4, 16@dp, 32@tp]``; ``2 × bf16[4, 16]`` or a list in parentheses where the node returns several."""
        parts = []
        for spec, layout in zip(specs(node), _layouts(node)):
            if isinstance(spec, Spec):
                shape = self.shape(spec, layout) if self.local else spec.shape
                parts.append(dtype_name(spec.dtype) + format_dims(shape, layout))
        if len(parts) > 1:
            return f"{len(parts)} × {parts[0]}" if len(set(parts)) == 1 else f"({', '.join(parts)})"
        return parts[0] if parts else ""

    def value(self, arg: Any) -> str:
        """An argument as it is printed."""
        if isinstance(arg, fx.Node):
            return self.names.get(arg, arg.name)
        if isinstance(arg, (list, tuple)):
            return f"[{', '.join(self.value(a) for a in arg)}]"
        if isinstance(arg, torch.dtype):
            return dtype_name(arg)
        if isinstance(arg, slice):
            return f"{arg.start}:{arg.stop}:{arg.step}"
        if isinstance(arg, float):
            return f"{arg:.6g}"
        return str(arg)

    def call(self, node: fx.Node) -> str:
        """``op(arguments)``; a conversion by the name of its collective."""
        row = row_of(node)
        if node.target is ops.convert and row:
            return self._convert(node, row)
        if callable(node.target) and not isinstance(node.target, torch._ops.OpOverload):
            return f"{op_name(node)}({', '.join(self._bound(node, node.target))})"
        parts = [self.value(a) for a in node.args] + [f"{k}={self.value(v)}" for k, v in node.kwargs.items()]
        return f"{op_name(node)}({', '.join(parts)})"

    def _bound(self, node: fx.Node, function: Callable[..., Any]) -> list[str]:
        """The arguments of a Python function by name, defaults left out, tensors without names."""
        try:
            signature = inspect.signature(function)
            given = signature.bind(*node.args, **node.kwargs).arguments
        except (TypeError, ValueError):  # builtins such as operator.getitem have no signature
            return [self.value(a) for a in node.args] + [f"{k}={self.value(v)}" for k, v in node.kwargs.items()]
        out = []
        for name, arg in given.items():
            parameter = signature.parameters[name]
            if not isinstance(arg, fx.Node) and (arg is parameter.default or arg == parameter.default):
                continue
            if name == "body":
                arg = body_text(arg)
            out.append(self.value(arg) if isinstance(arg, fx.Node) else f"{name}={self.value(arg)}")
        return out

    def _convert(self, node: fx.Node, row: Row) -> str:
        x, axis, src, dst = convert_args(node)
        parts = [self.value(x)]
        parts += [f"dim={str(t)[2:-1]}" for t in (src, dst) if isinstance(t, Shard)]
        parts += [axis] + ([row.mark] if row.mark else [])
        return f"{row.name}({', '.join(parts)})"

    def cost(self, node: fx.Node) -> str:
        """Bytes of the whole value that a collective makes or takes, flops of a matmul; "" else. Per rank."""
        row = row_of(node)
        if row is None:
            flops = self.flops(node)
            return scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")) if flops else ""
        first = specs(node)[0]
        gradient = first is None or (first.is_float and node.meta.get("diff", True))
        if not (row.forward or (row.backward and gradient)):
            return ""
        text = scaled(self._whole(node), 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
        return text if row.forward else f"backward {text}"

    def _whole(self, node: fx.Node) -> int:
        """Bytes of the value as it is where the axis does not shard it: the larger end, as this rank has it."""
        values = [n for n in [*tensor_args(node), node] if isinstance(n.meta.get("spec"), Spec)]
        sizes = [math.prod(self.shapes(n)[0]) * int(n.meta["spec"].dtype.itemsize) for n in values]
        ways = self.program.mesh.size(axis_of(node)) if row_of(node) == ROWS["SS"] else 1
        return max(sizes, default=0) * ways

    def flops(self, node: fx.Node) -> int:
        """Forward flops of a product on this rank; 0 for other ops. Causal attention counts half."""
        kind = MATMULS.get(op_name(node)) if node.op == "call_function" else None
        if kind is None or not isinstance(node.meta.get("spec"), Spec):
            return 0
        out = math.prod(self.shapes(node)[0])
        args = [self.shapes(a)[0] for a in tensor_args(node)]
        if kind == "attention":
            key = tensor_args(node)[1].meta
            ring = op_name(node) == "ring_attention"  # reads the keys of all ranks
            keys, (*_, width) = key.get("global", key["spec"]).shape[-2] if ring else args[1][-2], args[0]
            dense = 2 * keys * (math.prod(args[0]) + out) if width else 0
            at = list(inspect.signature(node.target).parameters).index("is_causal")  # type: ignore[arg-type]
            causal = node.kwargs.get("is_causal", node.args[at] if len(node.args) > at else False)
            return dense // 2 if causal else dense
        if kind == "convolution":
            return 2 * out * math.prod(args[1][1:])
        return 2 * out * args[1 if kind == "biased" else 0][-1]


MATMULS = {
    "linear": "plain", "mm": "plain", "bmm": "plain", "matmul": "plain",
    "addmm": "biased", "baddbmm": "biased",
    "attention": "attention", "attention_with_dropout": "attention",
    "ring_attention": "attention", "whole_attention": "attention",
    "convolution": "convolution", "conv1d": "convolution", "conv2d": "convolution", "conv3d": "convolution",
}  # fmt: skip


def scaled(amount: int, base: int, units: tuple[str, ...]) -> str:
    """Three significant digits with a unit: ``64 MiB``, ``0.27 TFLOP``."""
    power = 0
    while amount >= base ** (power + 1) and power < len(units) - 1:
        power += 1
    scaled = amount / base**power
    return f"{scaled:.3g} {units[power]}" if scaled < 1000 else f"{scaled:.0f} {units[power]}"
