"""Experts on ranks by measured load."""

from collections.abc import Iterator, Mapping, Sequence

from autopar.errors import AutoparError
from autopar.ir.placement import Placement
from autopar.runtime.load import ExpertLoad


def place_experts(load: Mapping[str, ExpertLoad], copies: int = 0, move: bool = True) -> dict[str, Placement]:
    """Where the experts of each layer should be, so that ranks compute about as many tokens.

    Greedy, as EPLB: the expert with the most tokens a copy gets one more, until ranks have ``copies`` on average; then
    the largest go first, each to the rank with the fewest tokens that has room. Never less even than the model's order.

    Args:
        load: ``pm.expert_load()``, or several steps' added up: by path of the layer.
        copies: experts that a rank computes at most besides those that it holds.
        move: False leaves each expert's home as it is in the model's own order.

    Returns:
        By path of the layer, what ``parallelize(placement=)`` takes; the same for the same load.

    Raises:
        AutoparError: ``bad-placement`` where ``copies`` is negative.
    """
    if copies < 0:
        raise AutoparError("bad-placement", f"place_experts: copies is {copies}", "0 or more")
    return {path: _best(o.tokens.tolist(), len(o.ranks), copies, move) for path, o in load.items()}


def _best(tokens: Sequence[float], ways: int, copies: int, move: bool) -> Placement:
    """The most even of the model's own order and the greedy ones with up to ``copies``; of equals that with fewest."""
    each = len(tokens) // ways
    plain = Placement(tuple(tuple(range(r * each, (r + 1) * each)) for r in range(ways)))
    return min((plain, *(_placed(tokens, ways, c, move) for c in range(copies + 1))), key=lambda p: p.imbalance(tokens))


def _placed(tokens: Sequence[float], ways: int, copies: int, move: bool) -> Placement:
    """Args: tokens: [E]. ways: ranks."""
    each = len(tokens) // ways
    many = _counts(tokens, ways, copies * ways)
    homes: list[list[int]] = [[] for _ in range(ways)]
    also: list[list[int]] = [[] for _ in range(ways)]
    busy = [0.0] * ways
    for expert, first in _largest_first(tokens, many, move):
        rows, room = (homes, each) if first else (also, copies)
        free = [r for r in range(ways) if len(rows[r]) < room and expert not in homes[r] + also[r]]
        free = [expert // each] if first and not move else free
        if free:  # no rank may be left that does not have it: then it has fewer copies
            rank = min(free, key=lambda r: (busy[r], r))
            rows[rank].append(expert)
            busy[rank] += tokens[expert] / many[expert]
    return Placement(tuple(tuple(sorted(h)) for h in homes), tuple(map(tuple, also)))


def _counts(tokens: Sequence[float], ways: int, copies: int) -> list[int]:
    """How many ranks compute each expert."""
    many = [1] * len(tokens)
    for _ in range(copies):
        hot = max(range(len(tokens)), key=lambda e: (many[e] < ways, tokens[e] / many[e], -e))
        if many[hot] == ways or not tokens[hot]:
            break
        many[hot] += 1
    return many


def _largest_first(tokens: Sequence[float], many: Sequence[int], move: bool) -> Iterator[tuple[int, bool]]:
    """Each expert as often as it is computed, and whether that is at its home; homes before all copies if they stay."""
    order = sorted(range(len(tokens)), key=lambda e: (-tokens[e] / many[e], e))
    turns = [(e, i == 0) for e in order for i in range(many[e])]
    return iter(turns if move else sorted(turns, key=lambda t: not t[1]))
