"""The Engram token map: tokens that read alike share one compressed id.

The hash multipliers depend on the number of classes, so a map that is off by one class makes every
lookup wrong; the count is therefore always checked.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.device.errors import CheckpointError
from deepinfer.model.config import V41Config

# Keeps a token that is exactly one space alive through the final strip.
_LONE_SPACE = "\ue000"
_REPLACEMENT = "\ufffd"


def _normalizer() -> normalizers.Sequence:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def build_token_map(tokenizer: Tokenizer, vocab_size: int, *, num_classes: int) -> torch.Tensor:
    """Return the compressed id of every token, [vocab_size] int32, numbered by first appearance.

    Args:
        tokenizer: the checkpoint's tokenizer, with its added tokens.
        vocab_size: `vocab_size` of the configuration; every id below it must exist.
        num_classes: `engram_compressed_vocab_size` of the configuration.
    Raises:
        CheckpointError: an id has no token, or the number of classes differs.
    Source: Engram token compression.
    """
    normalizer = _normalizer()
    classes: dict[str, int] = {}
    token_map = torch.empty(vocab_size, dtype=torch.int32)
    for token_id in range(vocab_size):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            raise CheckpointError(
                f"tokenizer has no token with id {token_id}, vocab_size is {vocab_size}; "
                "tokenizer.json and config.json do not belong together"
            )
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = token if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        token_map[token_id] = classes.setdefault(key, len(classes))
    if len(classes) != num_classes:
        raise CheckpointError(
            f"the tokenizer gives {len(classes)} compressed token classes, "
            f"engram_compressed_vocab_size is {num_classes}; every Engram row would be wrong: "
            "use the tokenizer.json of this checkpoint"
        )
    return token_map


def check_token_map(token_map: torch.Tensor, config: V41Config) -> torch.Tensor:
    """Return `token_map` after checking that it fits `config`; for maps that a caller injects.

    Args:
        token_map: [vocab_size] int32, values 0 .. engram_compressed_vocab_size - 1.
        config: the model configuration.
    Raises:
        CheckpointError: shape, dtype or range differ.
    """
    expected = (config.vocab_size,)
    if tuple(token_map.shape) != expected or token_map.dtype != torch.int32:
        raise CheckpointError(
            f"token map is {token_map.dtype} {tuple(token_map.shape)}, "
            f"expected torch.int32 {expected}"
        )
    smallest, largest = int(token_map.min()), int(token_map.max())
    if smallest < 0 or largest >= config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"token map holds ids {smallest} .. {largest}, expected 0 .. "
            f"{config.engram_compressed_vocab_size - 1} (engram_compressed_vocab_size)"
        )
    return token_map


def load_token_map(checkpoint: Path, config: V41Config) -> torch.Tensor:
    """Return the token map made from `tokenizer.json` of a checkpoint folder, [vocab_size] int32.

    Args:
        checkpoint: folder that holds `tokenizer.json`.
        config: its configuration; without Engram layers the map is all zeros and no file is read.
    Raises:
        CheckpointError: the file is missing or does not fit the configuration.
    """
    if not config.engram_layer_ids:
        return torch.zeros(config.vocab_size, dtype=torch.int32)
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing; Engram layers {list(config.engram_layer_ids)} need the tokenizer "
            "of the checkpoint to build their token map"
        )
    tokenizer = Tokenizer.from_file(str(file))
    return build_token_map(
        tokenizer, config.vocab_size, num_classes=config.engram_compressed_vocab_size
    )
