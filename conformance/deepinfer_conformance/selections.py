"""Comparison of selected indices: equal sets, up to ties at the last place."""

from __future__ import annotations

import enum
import itertools
import math

from torch import Tensor

from deepinfer.device.comparison import SelectionSet
from deepinfer_conformance.verdict import Verdict


class Order(enum.Enum):
    """Order in which a selection has to stand."""

    ASCENDING = "ascending"
    """By index, -1 at the end."""
    BEST_FIRST = "best_first"
    """By falling score."""


def _gap(score: float, last: float) -> float:
    """Relative distance of a score from the last selected one."""
    if score == last:
        return 0.0
    return abs(score - last) / max(abs(last), 1e-30)


def _row_error(
    chosen: list[int], expected: list[int], scores: list[float], *, order: Order, rtol: float
) -> tuple[float, str]:
    """Largest relative gap of a wrong choice; infinite for a malformed row."""
    found = [index for index in chosen if index >= 0]
    wanted = [index for index in expected if index >= 0]
    if chosen[: len(found)] != found or any(index != -1 for index in chosen[len(found) :]):
        return math.inf, "padding is -1 at the end"
    if len(found) != len(wanted) or len(set(found)) != len(found):
        return math.inf, f"expected {len(wanted)} distinct entries, got {found}"
    if any(index >= len(scores) or scores[index] == -math.inf for index in found):
        return math.inf, f"an entry that cannot be chosen is among {found}"
    if order is Order.ASCENDING and found != sorted(found):
        return math.inf, f"not ascending: {found}"
    ranked = [scores[index] for index in found]
    if order is Order.BEST_FIRST:
        for better, worse in itertools.pairwise(ranked):
            if worse > better and _gap(worse, better) > rtol:
                return math.inf, f"not best first: {found}"
    if not wanted:
        return 0.0, ""
    last = min(scores[index] for index in wanted)
    wrong = sorted(set(found) ^ set(wanted))
    worst = max((_gap(scores[index], last) for index in wrong), default=0.0)
    return worst, f"chose {found}, expected {wanted}"


def compare_selection(
    kind: SelectionSet, value: Tensor, truth: Tensor, *, scores: Tensor, order: Order
) -> Verdict:
    """Row by row: same count, same set but for candidates within rtol of the last selected.

    Args:
        kind: the contract's bound.
        value: [T, k] int64, -1 padded at the end.
        truth: [T, k] int64.
        scores: [T, n], -inf for what cannot be chosen.
        order: order the contract asks for.
    """
    worst, where = 0.0, ""
    for row, (chosen, expected, row_scores) in enumerate(
        zip(value.tolist(), truth.tolist(), scores.tolist(), strict=True)
    ):
        error, words = _row_error(chosen, expected, row_scores, order=order, rtol=kind.rtol)
        if error > worst:
            worst, where = error, f"row {row}: {words}"
    return Verdict(worst <= kind.rtol, worst, kind.rtol, where)
