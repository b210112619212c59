"""Export plain bf16 weights of a tiny model (flat config) to a checkpoint in the released layout.

    python tools/export_prototype.py SOURCE checkpoints/tiny-v41 --documents DIR

SOURCE holds config.json, *.safetensors and tokenizer.json (or --tokenizer FILE). DIR holds the
texts that go with the weights (MODEL_CARD.md, THIRD_PARTY_NOTICES); by default those of the target.
"""

# The family's special tokens are spelled with full-width bars.
# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from deepinfer.device.errors import CheckpointError, DeepInferError
from deepinfer.model.config import V41Config
from deepinfer.model.config_source import read_config_file
from deepinfer.model.token_map import load_token_map
from deepinfer.model.weights.reader import CheckpointReader
from deepinfer.model.weights.writer import write_checkpoint

# The tokenizer's reserved block; its id of the image placeholder, which text never holds.
IMAGE_TOKEN = "<｜image｜>"
DOCUMENTS = ("MODEL_CARD.md", "THIRD_PARTY_NOTICES")
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
    "pad_token": "<｜▁pad▁｜>",
    "clean_up_tokenization_spaces": False,
    "add_bos_token": False,
    "add_eos_token": False,
}


def release_config(source: Path, tokenizer: Path) -> V41Config:
    """Return the source's configuration without draft layers, with the tokenizer's special ids.

    Args:
        source: folder with the flat config.json.
        tokenizer: its tokenizer.json.
    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: the configuration is not usable.
    """
    raw = read_config_file(source)
    num_layers, ratios = raw["num_hidden_layers"], raw["compress_ratios"]
    if not isinstance(num_layers, int) or not isinstance(ratios, list):
        raise CheckpointError(f"{source}: num_hidden_layers {num_layers!r}, expected a number")
    added = {
        entry["content"]: entry["id"]
        for entry in json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]
    }
    return V41Config.from_json(
        {
            **raw,
            "compress_ratios": ratios[:num_layers],
            "num_nextn_predict_layers": 0,
            "bos_token_id": added[str(TOKENIZER_CONFIG["bos_token"])],
            "eos_token_id": added[str(TOKENIZER_CONFIG["eos_token"])],
            "pad_token_id": added[str(TOKENIZER_CONFIG["pad_token"])],
            "image_token_id": added[IMAGE_TOKEN],
        }
    )


def export(source: Path, target: Path, *, tokenizer: Path, documents: Path) -> None:
    """Write the checkpoint `target` anew and check that it reads back.

    Args:
        source: folder with config.json and *.safetensors.
        target: folder to make; an old export in it is replaced.
        tokenizer: tokenizer.json of the model.
        documents: folder with the texts that go with the weights.
    Raises:
        DeepInferError: something does not fit; an incomplete target has no config.json.
    """
    texts = {name: (documents / name).read_bytes() for name in DOCUMENTS}
    logical: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        logical |= {name: tensor.float() for name, tensor in load_file(file).items()}
    config = release_config(source, tokenizer)
    if target.exists():
        shutil.rmtree(target)
    write_checkpoint(target, config, logical, quantize=True)
    shutil.copyfile(tokenizer, target / "tokenizer.json")
    _write_json(
        target / "tokenizer_config.json",
        {**TOKENIZER_CONFIG, "model_max_length": config.max_position_embeddings},
    )
    _write_json(
        target / "generation_config.json",
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
        },
    )
    for name, text in texts.items():
        (target / name).write_bytes(text)
    load_token_map(target, config)
    CheckpointReader(target)
    _write_json(target / "MANIFEST.json", manifest(target, source))


def manifest(target: Path, source: Path) -> dict[str, object]:
    """Return size and SHA-256 of every file of `target`, and of the weights it was made from.

    Args:
        target: the exported checkpoint.
        source: the folder it was exported from.
    """
    return {
        "format": 1,
        "files": _hashes(target, "*"),
        "exported_from": _hashes(source, "*.safetensors"),
    }


def _hashes(folder: Path, pattern: str) -> dict[str, dict[str, object]]:
    return {
        file.name: {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(folder.glob(pattern))
        if file.name != "MANIFEST.json"
    }


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """Run the export from the command line; 0 on success, 2 when the source does not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="default: SOURCE/tokenizer.json")
    parser.add_argument("--documents", type=Path, help="default: TARGET")
    args = parser.parse_args()
    try:
        export(
            args.source,
            args.target,
            tokenizer=args.tokenizer or args.source / "tokenizer.json",
            documents=args.documents or args.target,
        )
    except (DeepInferError, OSError) as error:
        sys.stderr.write(f"export failed: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
