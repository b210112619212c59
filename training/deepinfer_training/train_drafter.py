"""Train the drafter of a trained backbone.

    python -m deepinfer_training.train_drafter --data DATA --config CONFIG --run RUN --minutes 3.5

Reads RUN/master-*.safetensors, writes RUN/drafter-*.safetensors and RUN/drafter_log.json. The
target is frozen and rounded as released. `--resume` goes on with the drafter that RUN holds. The
confidence is calibrated afterwards, by `fit_confidence`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.device.errors import ConfigError, DeepInferError
from deepinfer_training import fake_quant
from deepinfer_training.architecture import Architecture
from deepinfer_training.drafter import Anchors, DraftLoss, draft_loss, initial_drafter
from deepinfer_training.evaluation import Model
from deepinfer_training.optimizer import adamw, set_rate
from deepinfer_training.own_text import OwnText
from deepinfer_training.parameters import Part, load_master, save_master
from deepinfer_training.run_log import RunLog
from deepinfer_training.sampler import continue_prompts
from deepinfer_training.sequence_plan import Planner
from deepinfer_training.sequences import SequenceSource, Split
from deepinfer_training.speed import Speed
from deepinfer_training.train import master_files, pick_device, read_token_map
from deepinfer_training.weights import rounded_parameters

DRAFTER_STEM = "drafter"
_RATE = 2e-3
_BIAS_RATE = 1e-3
_CLIP_NORM = 1.0
_WARMUP, _DECAY_START, _QUANTIZED_FROM = 0.03, 0.4, 0.7
_REPORT_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class DraftBatches:
    """What the steps are made of.

    Attributes:
        own_every: every so many steps the batch is the target's own continuations.
        own_prompts: prompts that the target continues before the first step.
        own_anchors: blocks drafted in a row of the target's own text.
        anchors: blocks drafted in a sequence of training text.
        scale: divides all batch sizes, for a small machine.
    """

    own_every: int = 4
    own_prompts: int = 1024
    own_anchors: int = 16
    anchors: int = 128
    scale: int = 1

    def __post_init__(self) -> None:
        for name in ("own_every", "own_prompts", "own_anchors", "anchors", "scale"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a number from 1")


class DraftTrainer:
    """Owns the drafter's parameters and the frozen target."""

    def __init__(
        self, target: Model, drafter: dict[str, Tensor], source: SequenceSource, seed: int
    ) -> None:
        """Prepare to train `drafter` in place.

        Args:
            target: frozen, rounded as released.
            drafter: parameters on the target's device.
            source: natural and synthetic sequences.
            seed: of data and anchors.
        """
        self.target, self.drafter, self._source, self._seed = target, drafter, source, seed
        self._optimizer = adamw(drafter, _RATE)
        self._trained = [value for value in drafter.values() if value.requires_grad]
        self._generator = torch.Generator(target.device).manual_seed(seed)
        self._host_generator = torch.Generator().manual_seed(seed)
        self._index = 0
        self._own: OwnText | None = None

    def parameters(self) -> dict[str, Tensor]:
        """The drafter's and what it shares with the target."""
        shared = {name: self.target.parameters[name] for name in ("embed.weight", "head.weight")}
        return {**self.drafter, **shared}

    def natural(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """ids and documents [count, length] of the next training sequences."""
        batch = self._source.batch(Split.TRAIN, self._seed, self._index, count, length)
        self._index += count
        ids = torch.from_numpy(batch.ids.astype(np.int64)).to(self.target.device)
        documents = torch.from_numpy(batch.documents.astype(np.int64)).to(self.target.device)
        return ids, documents

    def write_own(self, prompts: int, prompt_length: int, count: int) -> None:
        """Let the target continue training prompts, half of them greedily, at 0.6 and at 1."""
        ids, _ = self.natural(prompts, prompt_length)
        temperatures = torch.tensor([0.0, 0.0, 0.6, 1.0])[torch.arange(prompts) % 4]
        ids = continue_prompts(self.target, ids, count, temperatures, self._generator)
        size = self.target.arch.dspark_block_size
        # The prompt's text is drafted as well, from where its window is full on.
        starts = torch.full((prompts,), self.target.arch.sliding_window, device=ids.device)
        padded = torch.nn.functional.pad(ids, (0, size), value=self.target.arch.pad_token_id)
        self._own = OwnText(padded, starts, torch.full_like(starts, ids.shape[1]))

    def take_own(self, own: OwnText) -> None:
        """Use text that the engine wrote."""
        self._own = own.to(self.target.device)

    def own_step(self, count: int, num_anchors: int, progress: float) -> DraftLoss:
        """One update on rows of about one length of the target's own text."""
        assert self._own is not None  # written before the first step
        last = max(1, len(self._own.ids) - count)
        first = int(torch.randint(last, (1,), generator=self._host_generator))
        own = self._own.part(first, count, self.target.arch)
        # An anchor has one token behind it at least; the token before the answer is one, too.
        positions = self._between(own.starts - 1, own.stops - 1, num_anchors)
        return self._step(own.ids, own.documents(), positions, progress)

    def natural_step(self, count: int, length: int, num_anchors: int, progress: float) -> DraftLoss:
        """One update on training text."""
        ids, documents = self.natural(count, length)
        size = self.target.arch.dspark_block_size
        low = torch.zeros(count, dtype=torch.int64, device=ids.device)
        positions = self._between(low, low + length - size, num_anchors)
        return self._step(ids, documents, positions, progress)

    def _between(self, low: Tensor, high: Tensor, num_anchors: int) -> Tensor:
        """[B, A] random positions from low [B] to high [B], the latter excluded."""
        share = torch.rand(
            (len(low), num_anchors), generator=self._generator, device=self.target.device
        )
        return low.unsqueeze(1) + (share * (high - low).unsqueeze(1)).long()

    def _step(
        self, ids: Tensor, documents: Tensor, positions: Tensor, progress: float
    ) -> DraftLoss:
        """One update on blocks at anchors [B, A]."""
        size = self.target.arch.dspark_block_size
        rotation = self.target.planner.plain_rotation(ids.shape[1] + size)
        anchors = Anchors(positions, documents, rotation)
        with torch.no_grad():
            result = self.target.run(ids, documents)
            at = (positions.unsqueeze(-1) + torch.arange(size, device=ids.device)).flatten(1)
            hidden = result.hidden.gather(
                1, at.unsqueeze(-1).expand(-1, -1, result.hidden.shape[-1])
            )
            logits = self.target.logits(hidden).view(*positions.shape, size, -1)
        numerics = fake_quant.ANNEALING if progress >= _QUANTIZED_FROM else fake_quant.TRAINING
        numerics = fake_quant.on_device(numerics, ids.device)
        loss = draft_loss(
            self.parameters(), self.target.arch, ids, result.taps, logits, anchors, numerics
        )
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, _CLIP_NORM)
        rising, falling = progress / _WARMUP + 0.02, (1.0 - progress) / (1.0 - _DECAY_START)
        set_rate(self._optimizer, max(0.0, min(1.0, rising, falling)))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if progress < _QUANTIZED_FROM:
            self._balance(loss.loads)
        return loss

    @torch.no_grad()
    def _balance(self, loads: Tensor) -> None:
        for stage, load in enumerate(loads):
            bias = self.drafter[f"mtp.{stage}.ffn.gate.bias"]
            bias.add_(_BIAS_RATE * torch.sign(load.mean() - load))


def train_drafter(
    trainer: DraftTrainer,
    minutes: float,
    batches: DraftBatches,
    log: RunLog,
    own: OwnText | None = None,
) -> None:
    """Train until the time is over.

    Args:
        trainer: what is trained.
        minutes: by the clock, the target's continuations included.
        batches: sizes.
        log: receives progress.
        own: text of the target; None: it continues training text first.
    """
    started, limit_s, scale = time.monotonic(), minutes * 60, batches.scale
    if own is not None:
        trainer.take_own(own)
    else:
        prompts = batches.own_prompts // scale
        trainer.write_own(prompts, 96, 96)
        log.line(f"target continued {prompts} prompts in {time.monotonic() - started:.1f} s")
    steps, reported = 0, time.monotonic()
    while (progress := (time.monotonic() - started) / limit_s) < 1.0:
        if steps % batches.own_every == 0:
            loss = trainer.own_step(max(2, 128 // scale), batches.own_anchors, progress)
        else:
            length = 1024 if scale == 1 else 256
            anchors = batches.anchors if scale == 1 else 16
            loss = trainer.natural_step(max(2, 32 // scale), length, anchors, progress)
        steps += 1
        if time.monotonic() - reported >= _REPORT_EVERY_S or steps == 1:
            reported = time.monotonic()
            overlap = [round(float(x), 3) for x in loss.acceptance]
            values = [round(float(x), 4) for x in loss[:4]]
            log.line(f"{progress:6.1%} drafter step {steps} total/ce/tv/confidence {values} "
                     f"acceptance {overlap}")  # fmt: skip
            log.record(progress=round(progress, 4), step=steps, losses=values, acceptance=overlap)
            log.save()
    log.content |= {"steps": steps, "minutes": minutes}


def main() -> int:
    """Train from the command line; 0 on success, 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data")
    parser.add_argument("--config", type=Path, required=True, help="flat config.json")
    parser.add_argument("--run", type=Path, required=True, help="folder of the backbone's run")
    parser.add_argument("--minutes", type=float, required=True, help="training time")
    parser.add_argument("--resume", action="store_true", help="start from the run's drafter")
    parser.add_argument("--speed", type=Path, help="JSON file that benchmark wrote")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--device", help="default: cuda if present, else cpu")
    parser.add_argument("--own-every", type=int, default=4, metavar="STEPS",
                        help="steps between batches of the target's own text")  # fmt: skip
    parser.add_argument("--own-prompts", type=int, default=1024, metavar="N",
                        help="prompts that the target continues first")  # fmt: skip
    parser.add_argument("--own", type=Path, metavar="FILE",
                        help="own text that deepinfer_training.own_text wrote")  # fmt: skip
    parser.add_argument("--own-anchors", type=int, default=16, help="blocks drafted in its rows")
    parser.add_argument("--anchors", type=int, default=128, help="blocks drafted in a sequence")
    parser.add_argument("--scale", type=int, default=1, help="divides all batch sizes")
    args = parser.parse_args()
    device = pick_device(args.device)
    try:
        batches = DraftBatches(
            args.own_every, args.own_prompts, args.own_anchors, args.anchors, args.scale
        )
        own = None if args.own is None else OwnText.load(args.own)
        arch = Architecture.from_json(args.config)
        source = SequenceSource(args.data, arch.pad_token_id)
        backbone = load_master(arch, Part.BACKBONE, master_files(args.run), device)
        drafter = (
            load_master(arch, Part.DRAFTER, master_files(args.run, DRAFTER_STEM), device)
            if args.resume
            else initial_drafter(backbone, arch, args.seed, device)
        )
    except DeepInferError as error:
        sys.stderr.write(f"drafter training cannot start: {error}\n")
        return 2
    Speed.load(args.speed).apply()
    planner = Planner(arch, read_token_map(args.data), device)
    numerics = fake_quant.on_device(fake_quant.ANNEALING, device)
    target = Model(rounded_parameters(backbone), arch, planner, numerics, device)
    trainer = DraftTrainer(target, drafter, source, args.seed)
    header = {
        "seed": args.seed, "base_rate": _RATE, "resumed": args.resume, "batches": asdict(batches),
    }  # fmt: skip
    log = RunLog(args.run / "drafter_log.json", header)
    train_drafter(trainer, args.minutes, batches, log, own)
    files = save_master(trainer.drafter, args.run, DRAFTER_STEM)
    log.save()
    log.line(f"drafter in {len(files)} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
