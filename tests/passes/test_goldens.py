"""What passes do to tiny models, as text: one file a case."""

from dataclasses import dataclass

import pytest

from autopar.ir.printer import print_program
from autopar.ir.program import Program
from autopar.passes.base import Context
from autopar.passes.pipeline import parse, run
from tests.passes.models import traced


@dataclass(frozen=True)
class Case:
    """A sentence that the golden shows, the pipeline whose last pass it is about, and a model on a mesh."""

    says: str
    model: str
    mesh: str
    pipeline: str
    rows: tuple[int, ...] | None = None
    rank: int = 0


DP, TP, TPS = "data-parallel", "data-parallel,tensor-parallel", "data-parallel,tensor-parallel{sequence}"
CASES = {
    "data-parallel/mlp": Case("Rows over dp; the loss is a term of the sum; parameters are R.", "mlp", "dp=2", DP),
    "data-parallel/tied": Case("The mean over tokens divides a local sum by the count of all ranks.", "tied",
        "dp=2", DP),
    "data-parallel/uneven": Case("Three rows and one.", "gated", "dp=2", DP, (3, 1)),
    "tensor-parallel/mlp": Case("Two products with biases over tp.", "mlp", "tp=2", TP),
    "tensor-parallel/gated": Case("One weight of two segments, each shared out, so that chunk is local.", "gated",
        "tp=2", TP),
    "tensor-parallel/fused": Case("Queries, keys and values in one weight of three segments.", "fused", "tp=2", TP),
    "tensor-parallel/fused-grouped": Case("The same with half as many key heads.", "fused-grouped", "tp=2", TP),
    "tensor-parallel/grouped": Case("Two key heads on four ranks: tp is split over groups and repeats.", "grouped",
        "tp=4", TP),
    "tensor-parallel/tied": Case("Embedding and head are one weight: one layout serves both.", "tied",
        "dp=2,tp=2", TP),
    "tensor-parallel/sequence": Case("Norms and residuals on a share of the positions.", "mlp", "tp=2", TPS),
    "context-parallel/ring": Case("A causal ring in zigzag order: positions follow, the loss is a term of the sum.",
        "grouped", "cp=2", f"{DP},context-parallel{{kind=ring}}"),
    "context-parallel/ulysses": Case("Heads over cp in attention; one key head is repeated for the ranks that read it.",
        "grouped", "cp=4", f"{DP},context-parallel{{kind=ulysses}}"),
    "reshard/mlp": Case("Every mismatch is a conversion.", "mlp", "dp=2,tp=2", f"{TP},reshard"),
    "reshard/grouped": Case("A value that three readers want converted is converted once.", "grouped", "tp=2",
        f"{TP},reshard"),
    "reshard/sequence": Case("Gathers and scatters of positions.", "fused-tied", "dp=2,tp=2", f"{TPS},reshard"),
    "pipeline/tied": Case("A weight that the first and the last of three stages hold.", "tied", "pp=3",
        f"{TP},reshard,pipeline{{microbatches=4}}"),
    "pipeline/named": Case("Stages begin where the user says; two to a rank.", "mlp", "pp=2",
        f"{TP},reshard,pipeline{{schedule=1f1b microbatches=2 stages=down}}"),
    "localize/mlp": Case("Sizes of a rank, and collectives with the axis as an argument.", "mlp", "dp=2,tp=2",
        f"{TP},reshard,localize"),
    "localize/tied": Case("A weight that is looked up and multiplied, as the second rank holds it.", "tied", "tp=2",
        f"{TP},reshard,localize", None, 1),
    "localize/uneven": Case("The rank that has one row of four.", "gated", "dp=2", f"{DP},reshard,localize", (3, 1), 1),
}  # fmt: skip


def show(case: Case) -> str:
    """The sentence, the pipeline, and the program before and after its last pass."""
    passes = parse(case.pipeline)
    before: Program = run(traced(case.model, case.mesh, case.rows), passes[:-1])
    after = run(before, passes[-1:], Context(at=before.mesh.coordinates(case.rank)))
    parts = [
        case.says,
        f"pipeline: {case.pipeline}",
        "=== before",
        print_program(before),
        "=== after",
        print_program(after),
    ]
    return "\n".join(parts)


@pytest.mark.parametrize("name", CASES)
def test_golden(golden, name):
    golden(show(CASES[name]), f"passes/{name}.text")
