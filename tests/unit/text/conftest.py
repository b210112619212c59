"""The tokenizers that text is tested with."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.text.tokenizer import TextTokenizer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def byte_tokenizer() -> TextTokenizer:
    """Of a tiny checkpoint: ids 3 to 258 are the 256 bytes, then merges, then added tokens."""
    return TextTokenizer.from_directory(ROOT / "tests/data/golden/tiny_a/checkpoint")
