"""The emitted module as the text of a Python file that runs by itself under torchrun."""

import base64
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.emit.function import Argument, Outer, code_of, outer_of, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.program import Param, Program, Spec

RANK = "__rank__"  # stands in names of functions for the ranks that share them

HEADER = '''"""A parallel module for the mesh {mesh}.

Run: torchrun --nproc-per-node {world} FILE [STATE_DICT]. Weights are cut from the whole ones that torch.save wrote to
STATE_DICT, or drawn at random. Does one training step on made-up inputs and prints the global loss.
"""
'''

TAIL = '''
def part(whole, name, axes):
    """This rank's part of a whole tensor."""
    for dim, shards in CUTS.get(name, {}).items():
        keep = torch.ones(whole.shape[dim], dtype=torch.bool)
        for axis, pieces in shards:
            start = 0
            for length, count, inner, shares in pieces:
                digit, c = torch.arange(length) // inner % count, axes[axis].coordinate
                first = sum(shares[:c])
                keep[start : start + length] &= (digit >= first) & (digit < first + shares[c])
                start += length
        whole = whole.index_select(dim, keep.nonzero().flatten())
    return whole.contiguous()


class Model(nn.Module):
    """This rank's parameters under the model's names; called with this data rank's inputs."""

    def __init__(self, state, axes):
        super().__init__()
        self.axes, self.table, self.streams = axes, {}, Streams(0)
        generator = torch.Generator().manual_seed(0)
        for name, (shape, dtype, trainable, ties) in TENSORS.items():
            given = [n for n in (name, *ties) if n in state]
            whole = state[given[0]].to(dtype) if given else VALUES.get(name)
            whole = made_up(shape, dtype, generator) if whole is None else whole
            local = part(whole, name, axes)
            self.table[name] = local if trainable is None else nn.Parameter(local, requires_grad=trainable)
            for alias in (name, *ties):
                self.place(alias, self.table[name])

    def place(self, name, tensor):
        """Register a tensor under a dotted name."""
        module, (*path, key) = self, name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        table = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
        table[key] = tensor

    def forward(self, *inputs):
        self.streams.advance()
        return FORWARDS[dist.get_rank()](self, *inputs)

    def step(self, *inputs):
        """Forward and backward; gradients and the loss are sums over the data axes."""
        loss = self(*inputs)[LOSS]
        loss.backward()
        total = loss.detach().clone()
        grads = [(p.grad, cut_over(name)) for name, p in self.named_parameters() if p.grad is not None]
        for tensor, cut in [(total, set()), *grads]:
            for axis in SUMMED_AXES:
                if self.axes[axis].size > 1 and axis not in cut:
                    tensor.copy_(all_reduce_invariant(tensor, self.axes[axis]))
        return total


def cut_over(name):
    """The axes that share a parameter out."""
    return {axis for shards in CUTS.get(name, {}).values() for axis, _ in shards}


def made_up(shape, dtype, generator):
    """Random numbers, or zeros where they are integers."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype) * 0.02
    return torch.zeros(shape, dtype=dtype)


def main():
    """One training step."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    axes = {}
    for name, parts in AXES.items():
        over = mesh[name] if parts == (name,) else mesh[parts]._flatten(name)
        axes[name] = Axis(name, over.size(), over.get_local_rank(), over.get_group().group_name)
    model = Model(torch.load(sys.argv[1]) if len(sys.argv) > 1 else {}, axes)
    generator = torch.Generator().manual_seed(1)
    inputs = [made_up(shape, dtype, generator) for shape, dtype in INPUTS]
    loss = model.step(*inputs)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.17g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def body_of(program: Program) -> tuple[str, dict[str, str], list[str]]:
    """Functions of one rank's program: text with ``RANK`` in their names, imports by line, inputs as text."""
    outer = outer_of(program, lambda path, name: True)
    texts, imports = [], {}
    graphs = {f"block_{_plain(n)}_{RANK}": b.graph for n, b in program.blocks.items()}
    for name, graph in {**graphs, f"outer_{RANK}": outer.graph}.items():
        text, scope = code_of(graph, name)
        if name in graphs:
            text = text.replace("(self, ", "(", 1)
        scope = {k: v for k, v in scope.items() if re.search(rf"\b{k}\b", text)}
        for key, line, short in _imports(scope):
            text = re.sub(rf"\b{key}\b", short, text)
            imports[line] = line
        texts.append(text.rstrip() + "\n")
    for i in range(len(outer.sites)):
        texts[-1] = texts[-1].replace(f"self.call{i}(", f"call{i}_{RANK}(self, ")
    texts += [_site(outer, i) for i in range(len(outer.sites))]
    values = [a.name for a in outer.arguments if a.kind == "value"]
    given = ", ".join(_given(a, "") for a in outer.arguments)
    texts.append(f"def forward_{RANK}({', '.join(['self', *values])}):\n    return outer_{RANK}(self, {given})\n")
    return "\n\n".join(texts), imports, [_input(program, i) for i in range(len(program.inputs))]


def source(
    mesh: Mesh,
    program: Program,
    bodies: Sequence[tuple[str, dict[str, str], list[str]]],
    values: Mapping[str, Tensor] | None = None,
) -> str:
    """The file's text. Ranks whose functions are equal share them.

    Args:
        program: any rank's.
        bodies: of every rank, in order (``body_of``).
        values: whole tensors that no state dict has, by name: buffers that are not saved, constants.
    """
    values = values or {}
    kinds = list(dict.fromkeys(text for text, _, _ in bodies))
    imports = sorted({line for _, lines, _ in bodies for line in lines} | {*_ALWAYS, *(_UNPACK if values else ())})
    lines = [HEADER.format(mesh=mesh, world=mesh.world), "\n".join(_ordered(imports)), ""]
    losses = [i for i, o in enumerate(program.outputs) if o.kind == "loss" or o.name == "loss"]
    lines += [
        f"MESH = {dict(mesh.axes)!r}",
        f"AXES = { ({a: (a,) for a in mesh.names} | {a: mesh.parts(a) for a, _ in mesh.user_axes})!r}",
        f"SUMMED_AXES = {mesh.summed_axes!r}",
        f"LOSS = {losses[0] if losses else 0}  # which output",
        f"INPUTS = [{', '.join(bodies[0][2])}]  # of rank 0",
        "# name: whole shape, dtype, whether it is trained (None: no parameter), further names",
        "TENSORS = {",
        *(f"    {name!r}: {_tensor(p)}," for name, p in program.params.items()),
        "}",
        "# name: what no state dict has",
        "VALUES = {",
        *(f"    {name!r}: {_packed(t)}," for name, t in values.items()),
        "}",
        "# name: dim: (axis, (length, count, inner, shares of each coordinate) of each segment)",
        "CUTS = {",
        *(f"    {name!r}: {cuts!r}," for name, p in program.params.items() if (cuts := _cuts(p, mesh))),
        "}",
        "",
    ]
    suffix = {text: "" if len(kinds) == 1 else f"_{i}" for i, text in enumerate(kinds)}
    lines += ["\n" + text.replace(f"_{RANK}", suffix[text]) + "\n" for text in kinds]
    entries = (f"forward{suffix[text]}" for text, _, _ in bodies)
    lines.append(f"FORWARDS = [{', '.join(entries)}]  # of each rank\n")
    return "\n".join(lines) + TAIL


_UNPACK = ("import base64", "import zlib")
_ALWAYS = (
    "import sys",
    "import torch",
    "import torch.distributed as dist",
    "from torch import nn",
    "from torch.distributed.device_mesh import init_device_mesh",
    "from autopar.runtime.axis import Axis",
    "from autopar.runtime.collectives import all_reduce_invariant",
    "from autopar.runtime.load import Loads",
    "from autopar.runtime.random import Streams",
)


def _ordered(lines: Sequence[str]) -> list[str]:
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    for line in lines:
        groups[2 if "autopar" in line else 1 if "torch" in line else 0].append(line)
    return [line for group in groups for line in ([*group, ""] if group else [])]


def _imports(scope: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name in the code, import line, name to use) of each global that the code reads."""
    for key, value in scope.items():
        if key in ("torch", "__builtins__"):
            continue
        if key in ("inf", "nan"):
            yield key, f"from math import {key}", key
        elif getattr(torch, key, None) is value:
            yield key, f"from torch import {key}", key
        elif hasattr(value, "__module__") and hasattr(value, "__name__"):
            # Values are named after functions, so functions need names that no value has.
            name = f"{value.__module__.rpartition('.')[2]}_{value.__name__}"
            yield key, f"from {value.__module__} import {value.__name__} as {name}", name


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _given(argument: Argument, path: str) -> str:
    if argument.kind == "param":
        return f"self.table[{argument.name!r}]"
    if argument.name == "load" and argument.kind == "handle":
        return f"Loads().at({path!r})"
    if argument.kind == "handle":
        return f"self.streams.at({path!r})" if argument.name == "rng" else f"self.axes[{argument.name!r}]"
    return argument.name


def _site(outer: Outer, i: int) -> str:
    site = outer.sites[i]
    values = ", ".join(["self", *(a.name for a in site.arguments if a.kind == "value")])
    given = ", ".join(_given(a, site.path) for a in site.arguments)
    return f"def call{i}_{RANK}({values}):\n    return block_{_plain(site.block)}_{RANK}({given})\n"


def _input(program: Program, i: int) -> str:
    found = [n for n in placeholders(program.graph) if n.meta.get("input") == i]
    spec = found[0].meta.get("spec") if found else None
    spec = spec if isinstance(spec, Spec) else program.inputs[i].spec
    return f"({tuple(spec.shape)!r}, {spec.dtype})"


def _tensor(p: Param) -> str:
    trainable = p.trainable if p.kind == "parameter" else None
    return f"({tuple(p.spec.shape)!r}, {p.spec.dtype}, {trainable}, {p.tied!r})"


def _packed(t: Tensor) -> str:
    raw = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    shape, text = tuple(t.shape), base64.b64encode(zlib.compress(raw)).decode()
    if not raw:
        return f"torch.empty({shape!r}, dtype={t.dtype})"
    unpacked = f"zlib.decompress(base64.b64decode({text!r}))"
    return f"torch.frombuffer(bytearray({unpacked}), dtype={t.dtype}).reshape({shape!r})"


def _cuts(p: Param, mesh: Mesh) -> dict[int, list[Any]]:
    out: dict[int, list[Any]] = {}
    assert p.layout is not None
    for axis, shard in p.layout.shards():
        ways = mesh.size(axis)
        pieces = [(k.length, k.count, k.inner, tuple(k.share(c, ways) for c in range(ways))) for k in shard.pieces]
        out.setdefault(shard.dim, []).append((axis, pieces))
    return out
