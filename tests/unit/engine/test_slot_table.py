"""Rows by slot: those of the sequences that hold the slots now, as wide as the longest of them."""

from __future__ import annotations

from typing import cast

from deepinfer.engine.output_text import OutputText
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.slot_table import SlotRows, SlotTable
from deepinfer.engine.step_state import SequenceMetadata


def sequence(slot: int, blocks: list[int], *, max_len: int = 100) -> Sequence:
    return Sequence(
        cast(Request, None), 0, [1], cast(OutputText, None), max_len=max_len, slot=slot,
        blocks=blocks,
    )  # fmt: skip


def rows(table: SlotTable, *sequences: Sequence) -> SlotRows:
    return table.rows(
        tuple(
            SequenceMetadata(each, each.generation, cast(int, each.slot), 0, 1, True, False)
            for each in sequences
        )
    )


def test_rows_stand_in_the_order_of_the_step() -> None:
    table = SlotTable(4, num_layers=3)
    found = rows(table, sequence(2, [7, 8], max_len=50), sequence(0, [5]))
    assert found.seq_slots.tolist() == [2, 0]
    assert found.block_table.tolist() == [[7, 8], [5, -1]]
    assert found.limits.tolist() == [49, 99]
    assert found.draft_floors.tolist() == [0, 0]


def test_further_and_replaced_blocks_are_seen() -> None:
    table, own = SlotTable(2, num_layers=3), sequence(1, [4])
    rows(table, own)
    own.add_blocks([6])
    assert rows(table, own).block_table.tolist() == [[4, 6]]
    own.replace_block(0, 9)
    assert rows(table, own).block_table.tolist() == [[9, 6]]


def test_a_new_owner_of_a_slot_leaves_nothing_of_the_one_before() -> None:
    table = SlotTable(2, num_layers=3)
    rows(table, sequence(0, [1, 2, 3], max_len=40))
    found = rows(table, sequence(0, [8]), sequence(1, [4, 5]))
    assert found.block_table.tolist() == [[8, -1], [4, 5]]
    assert found.limits.tolist() == [99, 99]


def test_tables_grow_and_keep_what_others_hold() -> None:
    table, other = SlotTable(2, num_layers=3), sequence(0, [3])
    rows(table, other)
    long = list(range(10, 60))
    assert rows(table, other, sequence(1, long)).block_table.tolist() == [[3] + [-1] * 49, long]


def test_rows_of_an_earlier_step_do_not_change() -> None:
    """A device whose work runs later still reads them."""
    table, own = SlotTable(1, num_layers=3), sequence(0, [4])
    before = rows(table, own)
    own.replace_block(0, 9)
    rows(table, own)
    assert before.block_table.tolist() == [[4]]
