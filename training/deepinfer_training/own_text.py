"""The target's own answers to prompts as users send them: what its drafter will have to foretell.

    python -m deepinfer_training.own_text --data DATA --config CONFIG --checkpoint CHECKPOINT \\
        --out own.safetensors [--backend cuda_sm100] [--per-domain 400]

The engine writes them, in normative numerics: two thirds greedily, the others at temperatures 0.6
and 1. Prompts are of the training split and of a seed that neither the fit of the confidence nor
any measurement uses.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.device.errors import ConfigError, DeepInferError
from deepinfer_training.architecture import Architecture
from deepinfer_training.sequences import SequenceSource, Split

_TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.6, 1.0)


class OwnText(NamedTuple):
    """Prompts with answers, shortest first.

    Attributes:
        ids: [B, L] integers; padding behind each row, a block at least.
        starts: [B] int64 first position of the answer.
        stops: [B] int64 position behind it.
    """

    ids: Tensor
    starts: Tensor
    stops: Tensor

    @classmethod
    def join(
        cls, asked: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], arch: Architecture
    ) -> OwnText:
        """Rows of prompts and their answers; an answer of one token has nothing to draft."""
        pairs = [(p, a) for p, a in zip(asked, answers, strict=True) if len(a) > 1]
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        starts = torch.tensor([len(p) for p, _ in pairs])
        stops = starts + torch.tensor([len(a) for _, a in pairs])
        length = whole_tiles(int(stops.max()) + arch.dspark_block_size, arch)
        ids = torch.full((len(pairs), length), arch.pad_token_id)
        for row, (prompt, answer) in enumerate(pairs):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        return cls(ids, starts, stops)

    @classmethod
    def load(cls, files: Sequence[Path]) -> OwnText:
        """Read what `save` wrote, into one, shortest rows first.

        Raises:
            ConfigError: one of the files does not exist, or holds something else.
        """
        parts = []
        for file in files:
            if not file.is_file():
                raise ConfigError(f"{file} does not exist; deepinfer_training.own_text writes it")
            try:
                parts.append(load_file(file))
            except SafetensorError as error:
                raise ConfigError(
                    f"{file} is no safetensors file ({error}); deepinfer_training.own_text "
                    "writes one"
                ) from error
            if missing := {"ids", "starts", "stops"} - parts[-1].keys():
                raise ConfigError(
                    f"{file} has no tensors {sorted(missing)}; expected one that "
                    "deepinfer_training.own_text wrote"
                )
        longest = max(part["ids"].shape[1] for part in parts)
        # A row is padded behind its end: the token there is the padding's.
        ids = torch.cat(
            [pad(p["ids"], (0, longest - p["ids"].shape[1]), value=int(p["ids"][0, -1]))
             for p in parts]
        )  # fmt: skip
        starts, stops = (torch.cat([part[name] for part in parts]) for name in ("starts", "stops"))
        order = torch.sort(stops, stable=True).indices
        return cls(ids[order], starts[order], stops[order])

    def save(self, file: Path) -> None:
        """Write a safetensors file."""
        save_file(
            {"ids": self.ids.to(torch.int32), "starts": self.starts, "stops": self.stops}, file
        )

    def to(self, device: torch.device) -> OwnText:
        """The same on a device."""
        return OwnText(*(tensor.to(device) for tensor in self))

    def part(self, first: int, count: int, arch: Architecture) -> OwnText:
        """Rows first .. first + count - 1, cut behind the longest."""
        rows = slice(first, first + count)
        longest = int(self.stops[rows].max()) + arch.dspark_block_size
        ids = self.ids[rows, : whole_tiles(longest, arch)].long()
        return OwnText(ids, self.starts[rows], self.stops[rows])

    def fitting(self, first: int, num_tokens: int, arch: Architecture) -> OwnText:
        """As many rows from `first` on as make up `num_tokens` with their padding; one at least."""
        count = min(num_tokens // whole_tiles(1, arch), len(self.ids) - first)
        longest = self.stops[first : first + count] + arch.dspark_block_size
        tile = whole_tiles(1, arch)
        rows = torch.arange(1, count + 1, device=longest.device)
        sizes = (longest + tile - 1) // tile * tile * rows
        return self.part(first, max(1, int((sizes <= num_tokens).sum())), arch)

    def documents(self) -> Tensor:
        """[B, L] int64: 0 for the row, 1 for the padding behind it."""
        place = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (place >= self.stops.unsqueeze(1)).long()


def whole_tiles(length: int, arch: Architecture) -> int:
    """The next length that a forward takes."""
    tile = 2 * arch.sliding_window
    return -(-length // tile) * tile


def write_own_text(
    arch: Architecture,
    source: SequenceSource,
    checkpoint: Path,
    *,
    backend: str,
    seed: int,
    per_domain: int,
    max_tokens: int,
) -> OwnText:
    """Let the engine answer.

    Raises:
        DeepInferError: the checkpoint or the backend cannot be had, or a prompt is refused.
    """
    # The engine is needed for this alone: training machines may lack what it imports.
    from deepinfer import LLM, SamplingParams
    from deepinfer.config import EngineConfig, override
    from deepinfer_training.rollouts import prompts

    asked, _ = prompts(source.generators, source.natural, Split.TRAIN, seed, per_domain)
    params = [
        SamplingParams(
            temperature=_TEMPERATURES[i % len(_TEMPERATURES)], max_tokens=max_tokens, seed=i
        )
        for i in range(len(asked))
    ]
    config = override(
        EngineConfig(),
        {
            "checkpoint.path": str(checkpoint), "numerics": "normative", "backend.name": backend,
            "scheduler.max_num_seqs": 256, "scheduler.max_num_tokens": 8192,
        },
    )  # fmt: skip
    begun, done = time.monotonic(), 0

    def tell(_: object) -> None:
        nonlocal done
        done += 1
        if done % 500 == 0:
            print(f"{done} of {len(asked)} answers, {time.monotonic() - begun:.0f} s", flush=True)

    with LLM(config) as llm:
        outputs = llm.generate([list(ids) for ids in asked], params, on_finished=tell)
    answers = [output.outputs[0].token_ids for output in outputs if output.error is None]
    if len(answers) != len(asked):
        failed = next(output for output in outputs if output.error is not None)
        raise ConfigError(f"prompt {failed.request_id} was not answered: {failed.error}")
    return OwnText.join(asked, answers, arch)


def main() -> int:
    """Write from the command line; 0 on success, 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data")
    parser.add_argument("--config", type=Path, required=True, help="flat config.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the target's export")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--backend", default="reference", help="that answers")
    parser.add_argument(
        "--seed", type=int, default=13, help="of the prompts; 11 is for fit_confidence"
    )
    parser.add_argument("--per-domain", type=int, default=400, help="prompts of each domain")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    args = parser.parse_args()
    try:
        arch = Architecture.from_json(args.config)
        source = SequenceSource(args.data, arch.pad_token_id)
        own = write_own_text(
            arch, source, args.checkpoint,
            backend=args.backend, seed=args.seed, per_domain=args.per_domain,
            max_tokens=args.max_tokens,
        )  # fmt: skip
    except DeepInferError as error:
        sys.stderr.write(f"cannot write: {error}\n")
        return 2
    own.save(args.out)
    tokens = int((own.stops - own.starts).sum())
    print(f"{len(own.ids)} answers, {tokens} tokens in {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
