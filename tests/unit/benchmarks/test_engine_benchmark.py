"""The turns of engines that are measured beside each other."""

from __future__ import annotations

import itertools
from collections import Counter

from benchmarks.engine_benchmark import in_turns


def test_each_run_comes_once_a_round_and_after_each_other_one_equally_often() -> None:
    for runs in ("ab", "abc"):
        num_rounds = 2 if runs == "ab" else 6
        order = list(in_turns(runs, num_rounds, "test"))
        rounds = [order[first : first + len(runs)] for first in range(0, len(order), len(runs))]
        assert all(sorted(each) == sorted(runs) for each in rounds)
        pairs = Counter(pair for each in rounds for pair in itertools.pairwise(each))
        assert len(pairs) == len(runs) * (len(runs) - 1)
        assert len(set(pairs.values())) == 1
