"""The memory of a null device: who wrote which position of a block, and what was poisoned."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from deepinfer.device.errors import ContractError


class Owner(NamedTuple):
    """An answer of a request in one of its lives (a preemption ends one), as the device sees it."""

    request_id: str
    answer: int
    life: int


class Place(NamedTuple):
    """Where a sequence's rows lie in a step, and which of them it may touch.

    Attributes:
        slot: of its window ring.
        blocks: its block table; -1 unused.
        floor: first position whose window row may be read: the first one computed in its life.
        write_from: first position whose row in a block may be written.
    """

    slot: int
    blocks: Sequence[int]
    floor: int = 0
    write_from: int = 0


class _Row(NamedTuple):
    """What a position holds: it follows from the whole text up to there."""

    position: int
    token_id: int
    text: int


class SavedRing(NamedTuple):
    """Window rows of positions first .. stop - 1, which follow from a text.

    Attributes:
        first: first position that is there.
        stop: position after the last one.
        good_from: first position from which on the rows are as in a run from the start.
        text: what the last row stands for.
    """

    first: int
    stop: int
    good_from: int
    text: int


class _Ring(NamedTuple):
    """Whose window rows a ring holds, and which; rows that were loaded are nobody's yet."""

    owner: Owner | None
    rows: SavedRing


SavedRows = tuple[_Row | None, ...]
"""What the rows of a block hold."""


class NullMemory:
    """KV rows by (block, offset) and window rings by slot; every access is checked.

    Any sequence may read a row of a block as long as it holds what its own text would have left
    there. Poison, another text's row and window rows that are missing or not yet good raise, and
    so does writing over a row that somebody else wrote and nobody has released.
    """

    def __init__(self, block_size: int, *, window: int, replay_len: int, poisons: bool) -> None:
        """Nothing written.

        Args:
            block_size: tokens per block.
            window: tokens of the sliding window.
            replay_len: rows that a sequence has to compute before its windows are good, unless it
                begins at position 0.
            poisons: released memory is poisoned, so what is not poisoned is somebody's.
        """
        self._block_size, self._window, self._replay_len = block_size, window, replay_len
        self._poisons = poisons
        self._rows: dict[tuple[int, int], _Row | None] = {}
        self._writers: dict[tuple[int, int], Owner] = {}
        self._rings: dict[int, _Ring | None] = {}

    def read(self, owner: Owner, place: Place, token_ids: Sequence[int]) -> None:
        """Read positions 0 .. len(token_ids) - 1, which must hold these tokens.

        Raises:
            ContractError: one of them holds something else.
        """
        self._read_window(owner, place, token_ids)
        text = 0
        for position, token_id in enumerate(token_ids):
            text = hash((text, token_id))
            found = self._rows.get(self._row(owner, place, position))
            if found != _Row(position, token_id, text):
                raise ContractError(
                    f"{_name(owner)} reads position {position} of block "
                    f"{place.blocks[position // self._block_size]}, which should hold token "
                    f"{token_id} and holds "
                    f"{'poison or nothing' if found is None else f'{found.token_id} of {found}'}"
                )

    def write(
        self, owner: Owner, place: Place, past: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Write tokens at the positions after `past`; window rows of all of them, and rows of
        blocks from `place.write_from` on.

        Raises:
            ContractError: a position has no block, the row is another's, or the window that the
                new row follows from is not good yet.
        """
        first, text = len(past), _text(past)
        ring = self._rings.get(place.slot)
        if ring is None or ring.owner not in (owner, None):
            good_from = first + self._replay_len - self._window if first else 0
            ring = _Ring(owner, SavedRing(first, first, good_from, text))
        stop = first + len(token_ids)
        rows = ring.rows._replace(stop=stop, text=_text(token_ids, text))
        self._rings[place.slot] = _Ring(owner, rows)
        for position, token_id in enumerate(token_ids, start=first):
            text = hash((text, token_id))
            if position >= place.write_from:
                self._write_row(owner, place, _Row(position, token_id, text))
            # The logits of a hit's last token may be wanted, too.
            if position >= place.write_from - 1:
                self._check_window(owner, rows, position)

    def _write_row(self, owner: Owner, place: Place, row: _Row) -> None:
        where = self._row(owner, place, row.position)
        writer = self._writers.get(where)
        if self._poisons and self._rows.get(where) is not None and writer != owner:
            raise ContractError(
                f"{_name(owner)} writes position {row.position} into block {where[0]}, over a row "
                f"of {'nobody' if writer is None else _name(writer)}; replayed rows read shared "
                "blocks and never write them"
            )
        self._rows[where] = row
        self._writers[where] = owner

    def poison(self, slot: int | None, blocks: Collection[int]) -> None:
        """Overwrite a slot (None for none) and blocks, now."""
        if slot is not None:
            self._rings[slot] = None
        for block in blocks:
            for offset in range(self._block_size):
                self._rows[block, offset] = None

    def save_block(self, block: int) -> SavedRows:
        """What a block holds."""
        return tuple(self._rows.get((block, offset)) for offset in range(self._block_size))

    def load_block(self, block: int, rows: SavedRows) -> None:
        """Put saved rows into a block; from now on they are nobody's to write."""
        for offset, row in enumerate(rows):
            self._rows[block, offset] = row
            self._writers.pop((block, offset), None)

    def save_window(self, slot: int) -> SavedRing | None:
        """What a ring holds; None: poison or nothing."""
        ring = self._rings.get(slot)
        return None if ring is None else ring.rows

    def load_window(self, slot: int, stop: int, saved: SavedRing | None) -> None:
        """Put the saved window before position `stop` into a ring.

        Raises:
            ContractError: another position's window was saved, or a part of it is missing.
        """
        if saved is not None and (saved.stop != stop or saved.first > stop - self._window):
            raise ContractError(
                f"window ring {slot} is to hold the window before position {stop}, and what was "
                f"saved are positions {saved.first} to {saved.stop - 1}"
            )
        self._rings[slot] = None if saved is None else _Ring(None, saved)

    def _read_window(self, owner: Owner, place: Place, past: Sequence[int]) -> None:
        """Window rows of the position after `past` below it must be there."""
        stop = len(past)
        first = max(place.floor, stop - self._window + 1)
        if first >= stop:
            return
        ring = self._rings.get(place.slot)
        if ring is not None and ring.owner is None:
            fits = ring.rows.stop == stop and ring.rows.text == _text(past)
        else:
            fits = ring is not None and ring.owner == owner
        if ring is None or not fits or ring.rows.first > first:
            raise ContractError(
                f"{_name(owner)} reads positions {first} to {stop - 1} of window ring "
                f"{place.slot}, which {self._ring_state(place.slot)}"
            )

    def _check_window(self, owner: Owner, rows: SavedRing, position: int) -> None:
        """What becomes of a row must follow from windows that are as in a run from the start."""
        if rows.good_from > max(0, position - self._window + 1):
            raise ContractError(
                f"{_name(owner)} computes position {position} after beginning at {rows.first}; "
                f"its windows are good from {rows.good_from} on: replay {self._replay_len} rows "
                "before a hit's end"
            )

    def _row(self, owner: Owner, place: Place, position: int) -> tuple[int, int]:
        column, offset = divmod(position, self._block_size)
        if column >= len(place.blocks) or place.blocks[column] < 0:
            raise ContractError(
                f"{_name(owner)} needs position {position}, its block table has "
                f"{sum(block >= 0 for block in place.blocks)} blocks of {self._block_size} "
                "tokens; reserve blocks before the launch"
            )
        return place.blocks[column], offset

    def _ring_state(self, slot: int) -> str:
        if slot not in self._rings:
            return "was never written"
        ring = self._rings[slot]
        if ring is None:
            return "is poisoned"
        whose = "was loaded" if ring.owner is None else f"is {_name(ring.owner)}'s"
        return f"{whose}, positions {ring.rows.first} to {ring.rows.stop - 1}"


def _text(token_ids: Sequence[int], before: int = 0) -> int:
    """What a row stands for that follows these tokens."""
    for token_id in token_ids:
        before = hash((before, token_id))
    return before


def _name(owner: Owner) -> str:
    return f"{owner.request_id}[{owner.answer}] (life {owner.life})"
