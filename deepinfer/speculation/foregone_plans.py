"""What plans that were not carried out would have yielded: by luck beside what was expected."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer.speculation.budget import Survival, admitted

_DECAY = 1.0 - 1.0 / 32.0
_FEWEST = 8
"""Rounds before anything is said."""


class Outcome(NamedTuple):
    """A round that verified all drafts though a plan was made.

    Attributes:
        num_drafts: K drafts of the batch that the plan would have verified.
        survival: [R, D] fp32 of the drafts that the round verified, all of them.
        accepted: [R] drafts accepted.
    """

    num_drafts: int
    survival: Survival
    accepted: npt.NDArray[np.int64]


class ForegonePlans:
    """Sums over rounds that verified all drafts, so that what a plan had left out is known.

    Newer rounds count for more: as many as the last 32.

    Attributes:
        correction: share of the tokens that plans kept, over the share that was expected; 1 until
            enough rounds are known. Confidences that are right make it 1 on average.
        error: its standard error.
    """

    def __init__(self) -> None:
        """No round is known."""
        # Tokens of all drafts and of those that the plan kept: that came, and expected.
        self._came, self._expected = np.zeros(2), np.zeros(2)
        self._num_rounds = 0
        self.correction, self.error = 1.0, 0.0

    def add(self, num_drafts: int, survival: Survival, accepted: npt.NDArray[np.int64]) -> None:
        """Count a round, the fields of whose Outcome these are."""
        lengths = admitted(survival, num_drafts)
        kept = np.arange(survival.shape[1]) < lengths[:, None]
        num_requests = len(survival)
        came = [accepted.sum(), np.minimum(accepted, lengths).sum()]
        expected = [survival.sum(), survival[kept].sum()]
        self._came = self._came * _DECAY + num_requests + came
        self._expected = self._expected * _DECAY + num_requests + expected
        self._num_rounds += 1
        if self._num_rounds >= _FEWEST:
            (all_came, kept_came), (all_expected, kept_expected) = self._came, self._expected
            self.correction = float(kept_came / all_came * all_expected / kept_expected)
            # Tokens that are lost come by chance one by one.
            self.error = math.sqrt(max(1.0, all_came - kept_came)) / float(all_came)
