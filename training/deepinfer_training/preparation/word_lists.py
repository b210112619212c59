"""Words and definitions that the synthetic documents use, from WordNet and how often it is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

# Where a common word is common: running prose.
_PROSE = ("austen", "sotu", "web")
_ENTRY = re.compile(r'([a-z]{3,9})(?:, [^()]*)? \((noun|verb|adjective|adverb)\): ([^;"]{8,70})')
_MIN_OCCURRENCES = 20
_MOST_COMMON, _NUM_WORDS, _MIN_LETTERS = 4000, 1500, 3


def definitions(wordnet: str) -> dict[str, list[str]]:
    """word -> [part of speech, short gloss]: the first sense of single plain words."""
    found: dict[str, list[str]] = {}
    for line in wordnet.split("\n"):
        entry = _ENTRY.match(line)
        if entry and entry[1] not in found and entry[3].isascii():
            found[entry[1]] = [entry[2], entry[3].strip()]
    return found


def count_words(texts: Mapping[str, str]) -> Counter[str]:
    """Occurrences of lower-cased words in the prose sources."""
    prose = " ".join(texts[name] for name in _PROSE).lower()
    return Counter(re.findall(r"[a-z]+", prose))


def word_lists(texts: Mapping[str, str]) -> tuple[list[str], dict[str, list[str]]]:
    """Words that tasks copy, the most frequent first, and definitions of common words."""
    defined, counts = definitions(texts["wordnet"]), count_words(texts)
    words = [word for word, _ in counts.most_common(_MOST_COMMON)
             if len(word) >= _MIN_LETTERS and word in defined]  # fmt: skip
    common = {w: entry for w, entry in defined.items() if counts[w] >= _MIN_OCCURRENCES}
    return words[:_NUM_WORDS], common
