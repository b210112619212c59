"""The printable characters by which a byte-level BPE vocabulary writes the 256 bytes."""

from __future__ import annotations

import functools


@functools.cache
def character_to_byte() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 stands for itself, the rest for U+0100 onwards.

    Source: byte-level BPE as introduced with GPT-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table
