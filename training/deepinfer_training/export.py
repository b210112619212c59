"""Write a run's weights as a checkpoint in the release format, with what goes beside them.

    python -m deepinfer_training.export --run RUN --config training/configs/tiny-v41.json \\
        --tokenizer DATA/tokenizer.json --out checkpoints/tiny-v41

Runs where the engine is installed; the training machine does not need it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.device.errors import CheckpointError, DeepInferError
from deepinfer.model.config import V41Config
from deepinfer.model.token_map import load_token_map
from deepinfer.model.weights.reader import CheckpointReader
from deepinfer.model.weights.writer import write_checkpoint
from deepinfer_training.architecture import Architecture
from deepinfer_training.train import LOG_FILE, master_files
from deepinfer_training.train_drafter import DRAFTER_STEM

MANIFEST = "MANIFEST.json"
DOCUMENTS = ("MODEL_CARD.md", "THIRD_PARTY_NOTICES")
# Copied from the run as they are, if the run made them.
RUN_FILES = ("sts.json", "expert_load.json", "eval.json", "loss.svg")
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<｜begin▁of▁sentence｜>",  # noqa: RUF001  (the family's spelling)
    "eos_token": "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "pad_token": "<｜▁pad▁｜>",  # noqa: RUF001
    "clean_up_tokenization_spaces": False,
    "add_bos_token": False,
    "add_eos_token": False,
}


def release_config(arch: Architecture, *, with_drafter: bool) -> V41Config:
    """The engine's configuration of an architecture.

    Raises:
        ConfigError: the structure contradicts itself.
    """
    fields = arch.to_fields()
    if not with_drafter:
        layers = arch.num_hidden_layers
        fields = {key: value for key, value in fields.items() if not key.startswith("dspark_")}
        fields |= {
            "num_nextn_predict_layers": 0,
            "compress_ratios": list(arch.compress_ratios[:layers]),
        }
    return V41Config.from_json(fields)


def export(
    run: Path, arch: Architecture, target: Path, *, tokenizer: Path, documents: Path
) -> None:
    """Write the checkpoint `target` anew and check that it reads back.

    Args:
        run: folder with master-*.safetensors, drafter-*.safetensors and the run's JSON files;
            without a drafter the checkpoint has none.
        arch: the model.
        target: folder to make; an old export in it is replaced.
        tokenizer: tokenizer.json the data was made with.
        documents: folder with the texts that go with the weights.
    Raises:
        DeepInferError: something does not fit; an incomplete target has no config.json.
    """
    texts = {name: (documents / name).read_bytes() for name in DOCUMENTS}
    backbone, drafter = master_files(run), master_files(run, DRAFTER_STEM)
    if not backbone:
        raise CheckpointError(f"{run} holds no master-*.safetensors; train first")
    logical: dict[str, Tensor] = {}
    for file in (*backbone, *drafter):
        logical |= {name: tensor.float() for name, tensor in load_file(file).items()}
    config = release_config(arch, with_drafter=bool(drafter))
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
    for name in RUN_FILES:
        if (run / name).is_file():
            shutil.copyfile(run / name, target / name)
    if (run / LOG_FILE).is_file():
        _write_json(target / LOG_FILE, _joined_log(run))
    for name, text in texts.items():
        (target / name).write_bytes(text)
    load_token_map(target, config)
    CheckpointReader(target)
    _write_json(target / MANIFEST, manifest(target, [*backbone, *drafter]))


def _joined_log(run: Path) -> dict[str, object]:
    """Logs of backbone and drafter in one file."""
    log: dict[str, object] = json.loads((run / LOG_FILE).read_text(encoding="utf-8"))
    drafter = run / "drafter_log.json"
    if drafter.is_file():
        log["drafter"] = json.loads(drafter.read_text(encoding="utf-8"))
    return log


def manifest(target: Path, sources: list[Path]) -> dict[str, object]:
    """Size and SHA-256 of every file of `target`, and of the masters it was made from."""
    files = [file for file in sorted(target.iterdir()) if file.name != MANIFEST]
    return {"format": 1, "files": _hashes(files), "exported_from": _hashes(sources)}


def _hashes(files: list[Path]) -> dict[str, dict[str, object]]:
    return {
        file.name: {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in files
    }


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """Export from the command line; 0 on success, 2 when something does not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--config", type=Path, required=True, help="flat config.json")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument(
        "--documents", type=Path, help="folder of card and notices (default: the target)"
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    try:
        arch = Architecture.from_json(args.config)
        export(
            args.run, arch, args.out, tokenizer=args.tokenizer, documents=args.documents or args.out
        )
    except (DeepInferError, OSError) as error:
        sys.stderr.write(f"export failed: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
