"""Which block holds which piece of text."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.device.errors import ContractError


class PrefixIndex:
    """Published blocks by the name of their content; a name has one block, a block one name."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._inexact: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def block(self, name: bytes) -> int | None:
        """The block of that name, or None."""
        return self._blocks.get(name)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known beginning of a chain of names."""
        found: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def is_exact(self, block: int) -> bool:
        """Whether a known block holds what a run from the start would have written."""
        return block not in self._inexact

    def add(self, name: bytes, block: int, *, is_exact: bool = True) -> None:
        """Publish a block.

        Args:
            name: of its content.
            block: the block.
            is_exact: whether it holds what a run from the start would have written.
        Raises:
            ContractError: the name has a block, or the block has a name.
        """
        if name in self._blocks or block in self._names:
            raise ContractError(
                f"prefix index: block {block} is to be published as {name.hex()}, which is block "
                f"{self._blocks.get(name)}; block {block} is published already: "
                f"{block in self._names}. Look the name up first"
            )
        self._blocks[name] = block
        self._names[block] = name
        if not is_exact:
            self._inexact.add(block)

    def remove(self, block: int) -> bytes:
        """Forget a block; its name.

        Raises:
            ContractError: it is not published.
        """
        name = self._names.pop(block, None)
        if name is None:
            raise ContractError(f"prefix index: block {block} is not published")
        del self._blocks[name]
        self._inexact.discard(block)
        return name
