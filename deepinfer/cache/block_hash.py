"""Names of cached blocks: a hash over everything that their content depends on.

The hash of a block covers the block before it, so equal hashes mean equal text from position 0
on. The first block follows a seed that two processes share only when model, tokenizer, numerics
and the byte layout of the caches are the same: a block under a known name can be used as it is,
also one that came from a disk or from another machine.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

_DIGEST_BYTES = 16
_SEED_PERSON = b"deepinfer.seed"
_BLOCK_PERSON = b"deepinfer.block"


def chain_seed(identity: Mapping[str, str | int]) -> bytes:
    """The hash that the first block of every sequence follows, 16 bytes.

    Args:
        identity: whatever changes the content or the layout of a block, by name; order is
            irrelevant.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=_SEED_PERSON)
    for name, value in sorted(identity.items()):
        for part in (name, str(value)):
            text = part.encode()
            digest.update(struct.pack("<q", len(text)) + text)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block, 16 bytes; the same on every machine.

    Args:
        parent: name of the block before it, or the seed.
        token_ids: its tokens.
    """
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    digest = hashlib.blake2b(parent, digest_size=_DIGEST_BYTES, person=_BLOCK_PERSON)
    digest.update(packed)
    return digest.digest()
