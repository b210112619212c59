"""What travels between layers can be gathered row by row, taps included."""

from __future__ import annotations

import torch

from deepinfer.model.layer_state import LayerState, initial_state


def test_gather_takes_the_rows_of_every_tensor() -> None:
    rows = torch.arange(5).unsqueeze(1)
    state = LayerState(
        streams=rows.unsqueeze(1).expand(-1, 2, 3).float(),
        pre=rows.expand(-1, 2).float(),
        entries=rows + 10,
        slots=rows + 20,
        candidates=rows + 30,
        taps=(rows + 40, rows + 50),
    )
    some = state.gather(torch.tensor([3, 0]))
    assert some.streams[:, 0, 0].tolist() == [3, 0]
    assert some.pre[:, 0].tolist() == [3, 0]
    others = (some.entries, some.slots, some.candidates, *some.taps)
    assert [value.flatten().tolist() for value in others if value is not None] == [
        [base + 3, base] for base in (10, 20, 30, 40, 50)
    ]


def test_gather_keeps_what_is_absent_absent() -> None:
    some = initial_state(torch.ones(4, 3), 2).gather(torch.tensor([1]))
    assert (some.entries, some.slots, some.candidates, some.taps) == (None, None, None, ())
    assert some.pre.tolist() == [[1.0, 0.0]]
