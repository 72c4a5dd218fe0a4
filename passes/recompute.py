"""Pass ``recompute``: what the backward computes again instead of keeping it."""

from dataclasses import dataclass
from typing import ClassVar

from autopar.cost.schedule import SPLIT
from autopar.errors import AutoparError
from autopar.ir.program import Form, Program
from autopar.passes.base import Context, Pass

POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class Recompute(Pass):
    """Blocks whose inner values are computed again in the backward.

    Does:
        Marks every block. "full" keeps a call's inputs only; "selective" also keeps the results of matrix products,
        attention and collectives, and recomputes the cheap rest. Random masks are drawn again for the same state.
    Requires:
        STAGED.
    Ensures:
        STAGED; every block says what it recomputes.
    Communication:
        "full" repeats a block's forward collectives in the backward; "selective" none.
    Limits:
        Refused with schedules that split the backward.
        What lies outside blocks is never recomputed; a model without equal layers has no block.
    Sources:
        Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198, section 5.
    """

    policy: str = "full"

    name: ClassVar[str] = "recompute"
    requires: ClassVar[Form] = Form.STAGED
    produces: ClassVar[Form] = Form.STAGED

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise AutoparError(
                "bad-strategy", f"Strategy(recompute={self.policy!r}) is not possible", f"one of {', '.join(POLICIES)}"
            )

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        if not program.blocks and self.policy != "none":
            context.warnings.append(f"recompute={self.policy}: the model has no equal layers, so nothing is recomputed")
        if program.stages is not None and program.stages.schedule in SPLIT and self.policy != "none":
            raise AutoparError(
                "split-backward", f"recompute={self.policy}: schedule {program.stages.schedule} runs a backward in two "
                "parts, and both would compute again", "use schedule=gpipe, 1f1b or interleaved, or recompute=none",
            )  # fmt: skip
        for block in program.blocks.values():
            block.recompute = self.policy
        return program
