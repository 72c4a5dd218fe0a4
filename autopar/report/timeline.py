"""A schedule as a grid: a row for each rank, time from left to right."""

from statistics import median_low

from rich.text import Text

from autopar.cost.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, WORDS, Action, Schedule, occupancies
from autopar.cost.table import duration
from autopar.cost.timeline import Span, Timeline

STYLES = {FORWARD: "white on blue", BACKWARD: "black on green", INPUT: "black on cyan", WEIGHT: "white on magenta"}
GAP = " ⋯ "


def grid(line: Timeline, width: int = 120) -> Text:
    """The timeline in lines of at most ``width`` columns (60 at least); ``.plain`` is the text without colours.

    ``F3`` is the forward of microbatch 3, dashes last as long as the action does, blanks are idle. Ranks with several
    stages say which: ``5F3``. The right side gives each rank's idle share of the step, and the most microbatches whose
    activations it holds at once, those of all its stages together. A step too long for the width shows its two ends.
    """
    schedule = line.schedule
    left = [f"{r:>4}  " for r in range(schedule.ranks)]
    right = list(map(_side, [idle / (line.seconds or 1.0) for idle in line.idle], _held(schedule)))
    rows = _elided(_rows(line), max(width, 60) - len(left[0]) - len(right[0]))
    out = Text(no_wrap=True)
    out.append(f"{schedule.name}: {_count(schedule.stages, 'stage')} on {_count(schedule.ranks, 'rank')}, ")
    out.append(f"{_count(schedule.microbatches, 'microbatch', 'es')}, {duration(line.seconds)} a step, ")
    out.append(f"{line.bubble:.1%} bubble\n", "bold")
    out.append(f"rank  {' ' * len(rows[0])}    idle  held\n", "dim")
    for before, row, behind in zip(left, rows, right):
        out.append(before, "dim").append_text(row).append(behind + "\n", "dim")
    kinds = {a.kind for order in schedule.orders for a in order}
    for kind in (k for k in STYLES if k in kinds):
        out.append(f" {kind} ", STYLES[kind]).append(f" {WORDS[kind]}  ")
    return out.append(" held: microbatches in flight at once", "dim")


def _held(schedule: Schedule) -> list[int]:
    return [max(map(sum, occupancies(schedule, rank))) for rank in range(schedule.ranks)]


def _side(idle: float, held: int) -> str:
    return f"  {idle:6.1%}  {held:>4}"


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _rows(line: Timeline) -> list[Text]:
    """A row for each rank, all equally long, at a scale at which the label of a usual action fits it."""
    several = line.schedule.stages > line.schedule.ranks
    spans = [s for row in line.spans for s in row]
    usual = median_low(s.end - s.start for s in spans)
    longest = max(len(_label(s.action, several)) for s in spans)
    scale = usual / (longest + 1) if usual else 1.0
    rows = [_row(row, scale, several) for row in line.spans]
    length = max(map(len, rows))
    for row in rows:
        row.pad_right(length - len(row))
    return rows


def _row(spans: tuple[Span, ...], scale: float, several: bool) -> Text:
    """The rank's actions; one that is shorter than a column takes one, and what follows moves on."""
    row = Text()
    for span in spans:
        row.pad_right(max(0, round(span.start / scale) - len(row)))
        columns = max(1, round(span.end / scale) - len(row))
        label = _label(span.action, several)
        short = label if len(label) < columns or columns == len(label) == 1 else span.action.kind
        row.append(short[:columns].ljust(max(1, columns - 1), "-").ljust(columns), STYLES[span.action.kind])
    return row


def _label(action: Action, several: bool) -> str:
    return str(action) if several else f"{action.kind}{action.microbatch}"


def _elided(rows: list[Text], room: int) -> list[Text]:
    """The rows' two ends, where they are longer than ``room``."""
    length = len(rows[0])
    if length <= room:
        return rows
    begin = (room - len(GAP)) // 2
    end = room - len(GAP) - begin
    return [row[:begin].append(GAP, "dim").append_text(row[length - end :]) for row in rows]
