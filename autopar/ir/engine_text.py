"""What an engine gathers and reduces, as rows of text."""

from autopar.ir.describe import dtype_name, scaled
from autopar.ir.names import fold
from autopar.ir.program import Engine, Group, Param

SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def title(engine: Engine) -> str:
    """One line: stage, axes, and what differs from the default."""
    words = [f"engine ZeRO stage {engine.stage} over {','.join(engine.axes) or 'no axis'}"]
    if engine.ways > 1:
        words.append(f"{engine.ways} ranks share out" + (f", {engine.copies} copies" if engine.copies > 1 else ""))
    words += [f"computes in {engine.precision}"] if engine.precision != "fp32" else []
    words += [f"offloads to {engine.offload}"] if engine.offload != "none" else []
    words += [f"gathers {engine.prefetch} ahead"] if engine.prefetch else []
    return ", ".join(words)


def rows(engine: Engine) -> list[tuple[str, ...]]:
    """For each group: unit, dtype, parameters, bytes gathered and how often, bytes reduced and how often."""
    facts = [(g.unit or "(outer)", _facts(engine, g)) for g in engine.groups]
    return [(name, *fact) for name, fact in fold(facts)]


def _facts(engine: Engine, group: Group) -> tuple[str, ...]:
    width = 2 if engine.precision == "bf16" and group.dtype.itemsize == 4 else group.dtype.itemsize
    gather = "once a step" if engine.stage < 3 else "each microbatch" if group.keeps else "twice each microbatch"
    reduce = "reduce_scatter" if group.ways > 1 else "all_reduce"
    both = " and all_reduce" if group.ways > 1 and engine.copies > 1 else ""
    often = "once a step" if engine.stage < 2 else "each microbatch"
    moved = f"all_gather {scaled(group.elements * width, 1024, SIZES)} {gather}" if group.ways > 1 else ""
    count = f"{len(group.names)} parameter{'s' if len(group.names) != 1 else ''}"
    count += f" over {','.join(group.axes)}" if group.axes != engine.axes else ""
    summed = f"{reduce}{both} {scaled(group.trainable * group.dtype.itemsize, 1024, SIZES)} {often}"
    return dtype_name(group.dtype), count, moved, summed if group.trainable else ""


def held(param: Param) -> list[str]:
    """How data ranks share the parameter out, as a remark."""
    return [f"dim {param.chunk.dim} in {param.chunk.ways}"] if param.chunk else []
