"""The tokenizer of the bundled checkpoint, and results as an engine would give them."""

from __future__ import annotations

import pytest

from deepinfer.config import bundled_checkpoint
from deepinfer.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    """Tokenizer with the family's chat tokens."""
    return TextTokenizer.from_directory(bundled_checkpoint())
