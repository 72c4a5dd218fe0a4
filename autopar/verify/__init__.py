"""Checks that every program passes after every pass."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.ir.program import Program


def check_program(program: "Program", after: str = "") -> None:
    """Structure, layouts, attention on a context axis, shapes (once LOCAL), stages and the engine (once STAGED).

    Raises AutoparError. What it says includes the lines around the fault.
    """
    # Loaded when something is checked: the package itself is loaded with autopar, which may not need torch.
    from autopar.ir.program import Form
    from autopar.verify.context import check_context
    from autopar.verify.engine import check_engine
    from autopar.verify.layouts import check_layouts
    from autopar.verify.stages import check_stages
    from autopar.verify.structure import check_structure

    check_structure(program, after)
    if Form.ANNOTATED <= program.form <= Form.RESHARDED:
        check_layouts(program, after)
        check_context(program, after)
    if program.form >= Form.LOCAL:
        from autopar.verify.shapes import check_shapes

        check_shapes(program, after)
    check_stages(program, after)
    if program.form >= Form.STAGED:
        check_engine(program, after)
