"""The two lawful choices of how many drafts a batch verifies, as functions of survival and cost.

Expected tokens of a step over its time is what is maximised: tau(K) / T(K), where tau(K) is one
token of each request and the K largest survivals. Whether a draft is verified may depend on what
was known before it was drawn, never on what it is; a maximum over all K of the step at hand looks
at confidences that depend on the drafts it decides about, and changes the distribution of outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer.device.ops.spec import SURVIVAL_FLOOR
from deepinfer.speculation.cost_tables import Times

Survival = npt.NDArray[np.float32]

_MAX_QUESTIONS = 64
"""Places at which a synchronous search may end."""
_MAX_SCALE = 3.0
"""Most by which a round's further drafts are taken to be better than those of earlier rounds."""


class Budget(NamedTuple):
    """A choice and what is expected of it.

    Attributes:
        num_drafts: K.
        tokens: expected tokens of the step.
        time_us: its time.
    """

    num_drafts: int
    tokens: float
    time_us: float


def expected_tokens(survival: Survival, num_requests: int) -> Times:
    """[N + 1] tokens expected of a step that verifies the 0, 1, ... N likeliest drafts.

    Args:
        survival: any shape with N fp32 values; below the floor, and NaN, counts as 0.
        num_requests: requests that sample; each one yields a token without drafts.
    """
    values = np.where(survival >= SURVIVAL_FLOOR, survival, np.float32(0.0)).ravel()
    values.sort()
    tokens = np.empty(len(values) + 1)
    tokens[0] = num_requests
    np.cumsum(values[::-1], dtype=np.float64, out=tokens[1:])
    tokens[1:] += num_requests
    return tokens


def best_budget(tokens: Times, times_us: Times) -> Budget:
    """The K with the most tokens per time over all K; of equal ones the smallest.

    Lawful only when `tokens` comes from confidences of steps whose drafts are decided about no
    more, while the drafts of the step at hand are ranked by their own.

    Args:
        tokens: [N + 1] by K.
        times_us: [N + 1] by K.
    """
    chosen = int(np.argmax(tokens / times_us))
    return Budget(chosen, float(tokens[chosen]), float(times_us[chosen]))


def early_stop_budget(tokens: Times, times_us: Times, envelope_us: Times) -> Budget:
    """The K at which one more draft first does not pay, then all that cost nothing more.

    Drafts are admitted one by one, likeliest first. On a staircase the first step up would end
    the search in front of a tier that pays; on its lower convex envelope tokens per time has one
    hill, so that the first K after which it does not rise is its top. The end of the tier is then
    filled, because its rows are paid for. Lawful for the step at hand: whether the K-th draft is
    admitted depends on the survivals of those before it and on its own.

    Args:
        tokens: [N + 1] by K, concave.
        times_us: [N + 1] by K, not falling.
        envelope_us: their `lower_envelope`.
    """
    rates = tokens / envelope_us
    falls = np.flatnonzero(rates[1:] <= rates[:-1])
    stop = int(falls[0]) if len(falls) else len(tokens) - 1
    same_time = int(np.searchsorted(times_us, times_us[stop], side="right")) - 1
    # Drafts below the floor add nothing, and are never admitted.
    useful = int(np.searchsorted(tokens, tokens[-1], side="left"))
    chosen = max(stop, min(same_time, useful))
    return Budget(chosen, float(tokens[chosen]), float(times_us[chosen]))


def foreseen_stop_budget(tokens: Times, times_us: Times, foreseen: Times) -> Budget:
    """The end of a tier after which no further tier is foreseen to pay.

    On a staircase of wide tiers the envelope is far below the times between its corners, and the
    search above ends in tiers that do not pay: with tiers at powers of two, 256 requests and the
    published times it loses 15 % against the best K. Here the question is asked at the end of
    each tier only: would the drafts of any further one pay for its step up, if they are worth
    what they were in earlier rounds, scaled as the next draft compares with the one in its place
    then, and at most what the next draft is worth? Lawful as above: an answer depends on the
    drafts admitted so far, on the next one's survival and on earlier rounds.

    Args:
        tokens: [N + 1] by K, concave.
        times_us: [N + 1] by K, not falling.
        foreseen: [N + 1] tokens of earlier rounds by K.
    """
    steps_up = np.flatnonzero(times_us[1:] > times_us[:-1])
    ends = np.append(steps_up, len(tokens) - 1)
    if len(ends) > _MAX_QUESTIONS:
        # A line has a step at every draft; near its best K the choice of K matters little.
        ends = ends[np.linspace(0, len(ends) - 1, _MAX_QUESTIONS).astype(np.int64)]
    next_value = np.append(np.diff(tokens), 0.0)[ends]
    next_foreseen = np.append(np.diff(foreseen), 0.0)[ends]
    scale = np.clip(next_value / np.maximum(next_foreseen, SURVIVAL_FLOOR), 0.0, _MAX_SCALE)
    # The next draft's own value is known, those behind it are foreseen.
    behind = foreseen[ends][None, :] - foreseen[np.minimum(ends + 1, len(foreseen) - 1)][:, None]
    gained = next_value[:, None] + behind * scale[:, None]
    most = next_value[:, None] * (ends[None, :] - ends[:, None])
    then = (tokens[ends][:, None] + np.minimum(gained, most)) / times_us[ends][None, :]
    later = ends[None, :] > ends[:, None]
    pays = (then > (tokens[ends] / times_us[ends])[:, None]) & later
    chosen = int(ends[np.argmin(pays.any(axis=1))])
    return Budget(chosen, float(tokens[chosen]), float(times_us[chosen]))


def admitted(survival: Survival, num_drafts: int) -> npt.NDArray[np.int64]:
    """[R] drafts of each request among the likeliest of the batch, as the device admits them.

    Args:
        survival: [R, D] fp32.
        num_drafts: K.
    """
    seqs, places = np.indices(survival.shape)
    order = np.lexsort((seqs.ravel(), places.ravel(), -survival.ravel()))
    chosen = order[:num_drafts]
    likely = chosen[survival.ravel()[chosen] >= SURVIVAL_FLOOR]
    counts: npt.NDArray[np.int64] = np.bincount(
        seqs.ravel()[likely], minlength=len(survival)
    ).astype(np.int64)
    return counts


def lower_envelope(times_us: Times) -> Times:
    """The largest convex function below [N + 1] times, at the same places."""
    corners: list[int] = []
    for place in range(len(times_us)):
        while len(corners) > 1:
            before, last = corners[-2], corners[-1]
            rise = (times_us[last] - times_us[before]) * (place - before)
            if rise < (times_us[place] - times_us[before]) * (last - before):
                break
            corners.pop()
        corners.append(place)
    return np.interp(np.arange(len(times_us)), corners, times_us[corners])
