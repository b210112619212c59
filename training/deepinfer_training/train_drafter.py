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
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.device.errors import ConfigError, DeepInferError
from deepinfer_training import fake_quant
from deepinfer_training.architecture import Architecture
from deepinfer_training.calibration import mean_accepted
from deepinfer_training.captured_step import CapturedStep, EagerStep, StepMaker
from deepinfer_training.draft_step import DraftInputs, DraftLossFunction
from deepinfer_training.drafter import DraftLoss, DraftObjective, initial_drafter
from deepinfer_training.evaluation import Model
from deepinfer_training.optimizer import adamw, set_rate
from deepinfer_training.own_text import OwnText, whole_tiles
from deepinfer_training.parameters import Part, load_master, save_master
from deepinfer_training.run_log import RunLog
from deepinfer_training.sampler import continue_prompts
from deepinfer_training.sequence_plan import Planner
from deepinfer_training.sequences import SequenceSource, Split
from deepinfer_training.speed import Speed
from deepinfer_training.target_states import TargetStates, drafts_along
from deepinfer_training.train import master_files, pick_device, read_token_map
from deepinfer_training.weights import rounded_parameters

DRAFTER_STEM = "drafter"
_RATE = 2e-3
_BIAS_RATE = 1e-3
_CLIP_NORM = 1.0
_WARMUP, _DECAY_START, _QUANTIZED_FROM = 0.03, 0.4, 0.7
_REPORT_EVERY_S, _MEASURE_EVERY_S = 10.0, 60.0


_Step = EagerStep[DraftInputs, DraftLoss] | CapturedStep[DraftInputs, DraftLoss]
_StepKey = tuple[torch.Size, torch.Size, bool]


@dataclass(frozen=True, slots=True)
class DraftBatches:
    """What the steps are made of.

    Attributes:
        own_every: every so many steps the batch is the target's own text.
        own_prompts: prompts that the target continues before the first step.
        own_rows: rows of its own text in a step.
        own_anchors: blocks drafted in each of them.
        anchors: blocks drafted in a sequence of training text.
        scale: divides all batch sizes, for a small machine.
    """

    own_every: int = 4
    own_prompts: int = 1024
    own_rows: int = 128
    own_anchors: int = 16
    anchors: int = 128
    scale: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ConfigError(f"{field.name} is {value}; expected a number from 1")


class DraftTrainer:
    """Owns the drafter's parameters and the frozen target."""

    def __init__(
        self,
        target: Model,
        drafter: dict[str, Tensor],
        source: SequenceSource,
        seed: int,
        objective: DraftObjective,
        speed: Speed,
    ) -> None:
        """Prepare to train `drafter` in place.

        Args:
            target: frozen, rounded as released.
            drafter: parameters on the target's device.
            source: natural and synthetic sequences.
            seed: of data and anchors.
            objective: weights of the losses.
            speed: how steps are run.
        """
        self.target, self.drafter, self._source, self._seed = target, drafter, source, seed
        self._objective = objective
        self._optimizer = adamw(drafter, _RATE)
        self._trained = [value for value in drafter.values() if value.requires_grad]
        self._generator = torch.Generator(target.device).manual_seed(seed)
        self._index = 0
        self._own: TargetStates | None = None
        self._held: TargetStates | None = None
        self._seen = self._order = torch.empty(0, dtype=torch.int64)
        self._makes = StepMaker(captures=speed.captured)
        self._steps: dict[_StepKey, _Step] = {}
        speed.apply()

    @property
    def capture_error(self) -> str | None:
        """Why steps run one call at a time."""
        return self._makes.error

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

    def write_own(self, prompts: int, prompt_length: int, count: int) -> OwnText:
        """Let the target continue training prompts, half of them greedily, at 0.6 and at 1."""
        ids, _ = self.natural(prompts, prompt_length)
        temperatures = torch.tensor([0.0, 0.0, 0.6, 1.0])[torch.arange(prompts) % 4]
        ids = continue_prompts(self.target, ids, count, temperatures, self._generator)
        size, window = self.target.arch.dspark_block_size, self.target.arch.sliding_window
        # The prompt's text is drafted as well, from where its window is full on.
        starts = torch.full((prompts,), window, device=ids.device)
        behind = whole_tiles(ids.shape[1] + size, self.target.arch) - ids.shape[1]
        padded = pad(ids, (0, behind), value=self.target.arch.pad_token_id)
        return OwnText(padded, starts, torch.full_like(starts, ids.shape[1]))

    def take_own(
        self, own: OwnText, held: int = 0, tell: Callable[[int], None] = lambda rows: None
    ) -> None:
        """Run the target over its own text, which the steps draft in from then on.

        Args:
            own: the text.
            held: rows that no step sees, for `held_accepted`.
            tell: called with the number of rows done.
        Raises:
            ConfigError: no row would be left, or the text is of another vocabulary.
        """
        if not 0 <= held < len(own.ids):
            raise ConfigError(
                f"held is {held}; expected 0 to {len(own.ids) - 1}, fewer than the rows of own text"
            )
        if (largest := int(own.ids.max())) >= self.target.arch.vocab_size:
            raise ConfigError(
                f"own text has token {largest}, the model {self.target.arch.vocab_size} tokens; "
                "let this model write it"
            )
        states = TargetStates.of(self.target, own, tell)
        order = torch.randperm(len(states), generator=self._generator, device=self.target.device)
        self._own, self._held = states, states.rows(order[:held]) if held else None
        self._seen, self._order = order[held:], order[:0]

    def own_step(self, count: int, num_anchors: int, progress: float) -> DraftLoss:
        """One update on rows of the target's own text; every row once before any comes again."""
        assert self._own is not None  # written before the first step
        while len(self._order) < count:
            device = self.target.device
            again = torch.randperm(len(self._seen), generator=self._generator, device=device)
            self._order = torch.cat((self._order, self._seen[again]))
        chosen, self._order = self._order[:count], self._order[count:]
        inputs = self._own.rows(chosen).at_random(num_anchors, self._generator)
        return self._step(inputs, progress)

    def natural_step(self, count: int, length: int, num_anchors: int, progress: float) -> DraftLoss:
        """One update on training text."""
        ids, documents = self.natural(count, length)
        last = length - self.target.arch.dspark_block_size
        share = torch.rand((count, num_anchors), generator=self._generator, device=ids.device)
        result = self.target.run(ids, documents)
        positions = (share * last).long()
        inputs = DraftInputs(ids, documents, positions, result.taps, result.hidden)
        return self._step(inputs, progress)

    def _step(self, inputs: DraftInputs, progress: float) -> DraftLoss:
        """One update on blocks at anchors."""
        quantised = progress >= _QUANTIZED_FROM
        key = (inputs.ids.shape, inputs.positions.shape, quantised)
        if key not in self._steps:
            numerics = fake_quant.ANNEALING if quantised else fake_quant.TRAINING
            loss = DraftLossFunction(
                self.parameters(), self.target,
                fake_quant.on_device(numerics, self.target.device), self._objective,
                inputs.ids.shape[1],
            )  # fmt: skip
            # Graphs of the phase before are over, and their memory with them.
            self._steps = {k: step for k, step in self._steps.items() if k[2] == quantised}
            self._steps[key] = self._makes.make(loss, inputs, self._trained)
        step = self._steps[key]
        result = step.run(inputs)
        torch.nn.utils.clip_grad_norm_(self._trained, _CLIP_NORM)
        rising, falling = progress / _WARMUP + 0.02, (1.0 - progress) / (1.0 - _DECAY_START)
        set_rate(self._optimizer, max(0.0, min(1.0, rising, falling)))
        self._optimizer.step()
        step.clear()
        if not quantised:
            self._balance(result.loads)
        return result

    @torch.no_grad()
    def _balance(self, loads: Tensor) -> None:
        for stage, load in enumerate(loads):
            bias = self.drafter[f"mtp.{stage}.ffn.gate.bias"]
            bias.add_(_BIAS_RATE * torch.sign(load.mean() - load))

    @torch.no_grad()
    def held_accepted(self) -> float | None:
        """Mean accepted drafts of greedy rounds over the rows held out; None without any."""
        if self._held is None:
            return None
        parameters = {**self.parameters(), **rounded_parameters(self.drafter)}
        rounds = [
            drafts_along(parameters, self.target, self._held.rows(chosen))
            for chosen in torch.arange(len(self._held), device=self.target.device).split(64)
        ]
        accepted, left = (torch.cat(parts).cpu() for parts in zip(*rounds, strict=True))
        return mean_accepted(accepted, left)


def train_drafter(
    trainer: DraftTrainer,
    minutes: float,
    batches: DraftBatches,
    log: RunLog,
    own: OwnText | None = None,
    held: int = 0,
) -> None:
    """Train until the time is over.

    Args:
        trainer: what is trained.
        minutes: by the clock, from the first step on.
        batches: sizes.
        log: receives progress.
        own: text of the target; None: it continues training text first.
        held: rows of it that are not trained on, but measured.
    """
    scale = batches.scale
    own = trainer.write_own(batches.own_prompts // scale, 96, 96) if own is None else own
    log.line(f"{len(own.ids)} rows of the target's own text")
    trainer.take_own(own, held, Progress(log, len(own.ids)).tell)
    started, limit_s = time.monotonic(), minutes * 60
    steps, reported, measured = 0, started, started
    while (progress := (time.monotonic() - started) / limit_s) < 1.0:
        if steps % batches.own_every == 0:
            rows = max(2, batches.own_rows // scale)
            loss = trainer.own_step(rows, batches.own_anchors, progress)
        else:
            length = 1024 if scale == 1 else 256
            anchors = batches.anchors if scale == 1 else 16
            loss = trainer.natural_step(max(2, 32 // scale), length, anchors, progress)
        steps += 1
        if time.monotonic() - reported >= _REPORT_EVERY_S or steps == 1:
            overlap = [round(float(x), 3) for x in loss.acceptance]
            values = [round(float(x.detach()), 4) for x in loss[:4]]
            reported = time.monotonic()
            log.line(f"{progress:6.1%} drafter step {steps} total/ce/tv/confidence {values} "
                     f"acceptance {overlap}")  # fmt: skip
            log.record(progress=round(progress, 4), step=steps, losses=values, acceptance=overlap)
            log.save()
        if time.monotonic() - measured >= _MEASURE_EVERY_S:
            _measure(trainer, log, steps)
            measured = time.monotonic()
    _measure(trainer, log, steps)
    log.content |= {"steps": steps, "minutes": minutes}


def _measure(trainer: DraftTrainer, log: RunLog, steps: int) -> None:
    if (accepted := trainer.held_accepted()) is not None:
        log.line(f"drafter step {steps}: {accepted:.3f} accepted drafts in rows held out")
        log.record(step=steps, held_accepted=round(accepted, 4))
        log.save()


class Progress:
    """Tells every few seconds how many rows the target has read."""

    def __init__(self, log: RunLog, total: int) -> None:
        self._log, self._total, self._told = log, total, time.monotonic()

    def tell(self, rows: int) -> None:
        """So many so far."""
        if time.monotonic() - self._told >= _REPORT_EVERY_S or rows == self._total:
            self._told = time.monotonic()
            self._log.line(f"target has read {rows} of {self._total} rows")


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
    parser.add_argument("--own", type=Path, metavar="FILE", nargs="+",
                        help="own text that deepinfer_training.own_text wrote")  # fmt: skip
    parser.add_argument("--held", type=int, default=0, metavar="ROWS",
                        help="rows of own text to measure on instead")  # fmt: skip
    parser.add_argument("--own-rows", type=int, default=128, help="its rows in a step")
    parser.add_argument("--own-anchors", type=int, default=16, help="blocks drafted in its rows")
    parser.add_argument("--anchors", type=int, default=128, help="blocks drafted in a sequence")
    parser.add_argument("--scale", type=int, default=1, help="divides all batch sizes")
    weights = DraftObjective()
    parser.add_argument("--cross-entropy", type=float, default=weights.cross_entropy,
                        help="its weight in the loss")  # fmt: skip
    parser.add_argument("--distance", type=float, default=weights.distance,
                        help="weight of the distance to the target's distribution")  # fmt: skip
    parser.add_argument("--sharp-distance", type=float, default=weights.sharp_distance,
                        help="weight of the distance at a low temperature")  # fmt: skip
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes}; expected a number above 0")
    device = pick_device(args.device)
    try:
        batches = DraftBatches(
            args.own_every, args.own_prompts, args.own_rows, args.own_anchors, args.anchors,
            args.scale,
        )  # fmt: skip
        objective = DraftObjective(args.cross_entropy, args.distance, args.sharp_distance)
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
    planner = Planner(arch, read_token_map(args.data), device)
    numerics = fake_quant.on_device(fake_quant.ANNEALING, device)
    target = Model(rounded_parameters(backbone), arch, planner, numerics, device)
    speed = Speed.load(args.speed)
    trainer = DraftTrainer(target, drafter, source, args.seed, objective, speed)
    header = {
        "seed": args.seed, "base_rate": _RATE, "resumed": args.resume, "batches": asdict(batches),
        "objective": asdict(objective), "speed": speed.to_fields(),
    }  # fmt: skip
    log = RunLog(args.run / "drafter_log.json", header)
    try:
        train_drafter(trainer, args.minutes, batches, log, own, args.held)
    except ConfigError as error:
        sys.stderr.write(f"drafter training cannot start: {error}\n")
        return 2
    log.content["capture_error"] = trainer.capture_error
    files = save_master(trainer.drafter, args.run, DRAFTER_STEM)
    log.save()
    log.line(f"drafter in {len(files)} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
