"""Section `cache`: size and shape of the memory that holds keys and values."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from deepinfer.config.section import Section

_UNIT_BYTES = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[KMGT]i?B|B)", re.IGNORECASE)


def parse_memory_size(text: str) -> int:
    """Return the bytes that a size such as "2GiB", "1.5 GB" or "4096B" stands for.

    Args:
        text: a number and a unit: B, KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (of 1000).
    Raises:
        ValueError: the text has another form, or is less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a number with a unit such as 512MiB or 2GiB")
    size_bytes = int(float(match["number"]) * _UNIT_BYTES[match["unit"].upper()])
    if size_bytes < 1:
        raise ValueError("is less than one byte")
    return size_bytes


def _check_size(value: str | int | None) -> str | int | None:
    if isinstance(value, str):
        parse_memory_size(value)
    elif value is not None and value < 1:
        raise ValueError("is less than one byte")
    return value


def _check_host_size(value: str | int) -> str | int:
    if isinstance(value, str):
        parse_memory_size(value)
    elif value < 0:
        raise ValueError("is negative")
    return value


def _check_even(value: int) -> int:
    if value % 2:
        raise ValueError("is odd, but a compressed row covers two tokens of the same block")
    return value


class CacheSection(Section):
    """Blocks of the key-value cache."""

    block_size: Annotated[int, AfterValidator(_check_even)] = Field(
        default=64, ge=2, description="the tokens in a block, an even number from 2"
    )
    prefix: bool = Field(
        default=False, description="true or false: keep blocks for prompts that begin alike"
    )
    memory: Annotated[str | int | None, AfterValidator(_check_size)] = Field(
        default=None,
        description="a size such as 512MiB or 2GiB, or a number of bytes; "
        "null = sized from what the device has free",
    )
    num_blocks: int | None = Field(
        default=None,
        ge=1,
        description="an exact number of blocks from 1, instead of `memory`; null = from `memory`",
    )

    host_memory: Annotated[str | int, AfterValidator(_check_host_size)] = Field(
        default=0,
        description="a size such as 4GiB, or a number of bytes, of host memory that keeps blocks "
        "and windows beyond the device's own, for `prefix`; 0 = none",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.memory is not None and self.num_blocks is not None:
            raise ValueError(
                f"memory {self.memory!r} and num_blocks {self.num_blocks} both say how large the "
                "cache is; set one of them"
            )
        if self.host_memory_bytes and not self.prefix:
            raise ValueError(
                f"host_memory is {self.host_memory!r}, but with prefix false nothing is kept "
                "there; set prefix to true, or host_memory to 0"
            )
        return self

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of host memory for blocks and windows; 0 for none."""
        size = self.host_memory
        return parse_memory_size(size) if isinstance(size, str) else size

    @property
    def memory_bytes(self) -> int | None:
        """The bytes for the cache; None when they follow from the device or `num_blocks`."""
        return parse_memory_size(self.memory) if isinstance(self.memory, str) else self.memory
