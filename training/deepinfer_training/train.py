"""Train the backbone until a wall-clock limit.

    python -m deepinfer_training.train --data DATA --config training/configs/tiny-v41.json \\
        --out RUN --minutes 16

Writes RUN/master-*.safetensors (bf16), RUN/training_log.json. Progress is printed every ten
seconds. `--resume FOLDER` starts from a master's files instead of random weights.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from deepinfer.device.errors import DeepInferError
from deepinfer_training.architecture import Architecture
from deepinfer_training.captured_step import CapturedStep, EagerStep, StepMaker
from deepinfer_training.evaluation import Model, exactness
from deepinfer_training.fake_quant import TRAINING, on_device
from deepinfer_training.indexer import SelectionMode
from deepinfer_training.loader import Loader
from deepinfer_training.optimizer import BASE_RATE, adamw, set_rate
from deepinfer_training.parameters import (
    Part,
    initial_parameters,
    load_master,
    save_master,
)
from deepinfer_training.run_log import RunLog
from deepinfer_training.schedule import SCHEDULES, Phase, Recipe, Schedule
from deepinfer_training.sequence_plan import Planner
from deepinfer_training.sequences import Batch, SequenceSource, Split
from deepinfer_training.speed import Speed
from deepinfer_training.step import DomainTotals, Inputs, LossFunction, StepResult
from deepinfer_training.tasks import Tasks

MASTER_STEM = "master"
LOG_FILE = "training_log.json"
_CLIP_NORM = 1.0
_OUTLIER = 10.0
_REPORT_EVERY_S = 10.0
_CHECK_EVERY_S = 90.0
_CUT_SHARE = 0.2
_SHORTEST_CUT = 64


@dataclass(frozen=True, slots=True)
class Run:
    """What a training run is given.

    Attributes:
        arch: the model.
        schedule: phases and rates.
        minutes: length of the training, by the clock.
        tokens_per_step: B * T of every step.
        seed: of initialisation, data and cuts.
        speed: how steps are executed.
        base_rate: peak learning rate of matrices.
        report_every_s: time between two progress lines.
    """

    arch: Architecture
    schedule: Schedule
    minutes: float
    tokens_per_step: int
    seed: int
    speed: Speed
    base_rate: float = BASE_RATE
    report_every_s: float = _REPORT_EVERY_S


class Trainer:
    """Owns parameters, optimizer and the current phase's step."""

    def __init__(
        self,
        run: Run,
        parameters: dict[str, Tensor],
        token_map: Tensor,
        device: torch.device,
    ) -> None:
        """Prepare to train `parameters` in place.

        Args:
            run: the settings.
            parameters: of the backbone, on the device.
            token_map: [V] compressed token ids.
            device: where to train.
        """
        self.run, self.parameters, self.device = run, parameters, device
        self.planner = Planner(run.arch, token_map, device)
        self.totals = DomainTotals(device)
        self._optimizer = adamw(parameters, run.base_rate)
        self._trained = [value for value in parameters.values() if value.requires_grad]
        self._biases = [
            parameters[f"layers.{layer}.ffn.gate.bias"]
            for layer in range(run.arch.num_hidden_layers)
        ]
        self._cuts = np.random.default_rng(run.seed)
        self._norms: list[float] = []
        self._phase: Phase | None = None
        self._step: EagerStep[Inputs, StepResult] | CapturedStep[Inputs, StepResult] | None = None
        self.steps = StepMaker(captures=run.speed.captured)
        self.num_steps = self.num_skipped = self.num_tokens = 0
        run.speed.apply()

    def rows(self, phase: Phase) -> int:
        """Sequences of a step."""
        return max(1, self.run.tokens_per_step // phase.length)

    def inputs(self, batch: Batch, phase: Phase) -> Inputs:
        """A batch on the device; in sparse phases some sequences get a replay cut."""
        cut = np.zeros(len(batch), np.int64)
        if phase.mode is SelectionMode.SPARSE and phase.length > _SHORTEST_CUT:
            drawn = self._cuts.random(len(batch)) < _CUT_SHARE
            cut[drawn] = self._cuts.integers(_SHORTEST_CUT, phase.length, int(drawn.sum()))
        return Inputs(
            torch.from_numpy(batch.ids.astype(np.int64)).to(self.device),
            torch.from_numpy(batch.documents.astype(np.int64)).to(self.device),
            torch.from_numpy(batch.weights.astype(np.float32)).to(self.device),
            torch.from_numpy(batch.domains.astype(np.int64)).to(self.device),
            torch.from_numpy(cut).to(self.device),
        )

    def step(self, batch: Batch, phase: Phase, progress: float) -> tuple[StepResult, float]:
        """One update; returns the step's report and the norm of its gradient."""
        inputs = self.inputs(batch, phase)
        if phase != self._phase or self._step is None:
            self._enter(phase, inputs)
        assert self._step is not None
        result = self._step.run(inputs)
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, _CLIP_NORM))
        if self._is_outlier(norm):
            self.num_skipped += 1
        else:
            set_rate(self._optimizer, self.run.schedule.rate(progress))
            self._optimizer.step()
            self._balance(result.loads, self.run.schedule.bias_rate(progress))
        self._step.clear()
        self.num_steps += 1
        self.num_tokens += inputs.ids.numel()
        return result, norm

    def _enter(self, phase: Phase, example: Inputs) -> None:
        self._step = None  # frees the memory of the graph before
        loss = LossFunction(
            self.parameters, self.run.arch, self.planner, phase, self.totals, self.device
        )
        self._step = self.steps.make(loss, example, self.parameters.values())
        self._phase = phase

    def _is_outlier(self, norm: float) -> bool:
        """Whether a gradient is too large to use; the first hundred steps set the measure."""
        recent = median(self._norms) if len(self._norms) >= 100 else None
        outlier = not math.isfinite(norm) or (recent is not None and norm > _OUTLIER * recent)
        if math.isfinite(norm):
            self._norms.append(min(norm, 3.0 * recent) if recent else norm)
            del self._norms[:-100]
        return outlier

    @torch.no_grad()
    def _balance(self, loads: Tensor, rate: float) -> None:
        """Move every router bias towards an even load."""
        if rate:
            direction = torch.sign(loads.mean(1, keepdim=True) - loads) * rate
            for bias, change in zip(self._biases, direction, strict=True):
                bias.add_(change)


def train(trainer: Trainer, loader: Loader, tasks: Tasks, log: RunLog, out: Path) -> None:
    """Run the schedule to its end, saving at half, at four fifths and at the end.

    Args:
        trainer: what is trained.
        loader: batches.
        tasks: checked now and then.
        log: receives progress.
        out: folder of the master.
    """
    run = trainer.run
    started, limit_s = time.monotonic(), run.minutes * 60
    reported, checked, counted = started, started, 0
    saves = [0.5, 0.8]
    phase: Phase | None = None
    while (progress := (time.monotonic() - started) / limit_s) < 1.0:
        current = run.schedule.phase(progress)
        if current != phase:
            phase = current
            loader.set_length(phase.length)
            log.line(f"phase at {progress:.0%}: {phase}")
        result, norm = trainer.step(loader.next(trainer.rows(phase)), phase, progress)
        now = time.monotonic()
        if now - reported >= run.report_every_s or trainer.num_steps == 1:
            speed = (trainer.num_tokens - counted) / (now - reported)
            _report(log, trainer, phase, result, norm, progress, speed, loader.waited_s)
            reported, counted = now, trainer.num_tokens
        if now - checked >= _CHECK_EVERY_S:
            _check(log, trainer, tasks, phase)
            checked = reported = time.monotonic()
        if saves and progress >= saves[0]:
            saves.pop(0)
            save_master(trainer.parameters, out, MASTER_STEM)
    seconds = time.monotonic() - started
    files = save_master(trainer.parameters, out, MASTER_STEM)
    log.content |= {
        "steps": trainer.num_steps,
        "skipped_steps": trainer.num_skipped,
        "tokens": trainer.num_tokens,
        "training_seconds": round(seconds, 1),
        "capture_error": trainer.steps.error,
    }
    log.save()
    log.line(
        f"trained {trainer.num_tokens / 1e6:.1f} M tokens in {trainer.num_steps} steps, "
        f"{trainer.num_tokens / seconds / 1e3:.0f} k tokens/s, {trainer.num_skipped} skipped; "
        f"master in {len(files)} files"
    )


def _report(
    log: RunLog,
    trainer: Trainer,
    phase: Phase,
    result: StepResult,
    norm: float,
    progress: float,
    tokens_per_s: float,
    waited_s: float,
) -> None:
    by_domain = trainer.totals.take()
    caught = [round(float(x), 3) for x in result.caught]
    imbalance = (result.loads.amax(1) / result.loads.mean(1).clamp_min(1e-9)).tolist()
    memory = torch.cuda.max_memory_allocated() / 2**30 if trainer.device.type == "cuda" else 0.0  # noqa: TID251
    log.line(
        f"{progress:6.1%} step {trainer.num_steps} {trainer.num_tokens / 1e6:.1f} M tokens "
        f"{tokens_per_s / 1e3:.0f} k/s loss {float(result.loss):.3f} "
        f"index {float(result.index_loss):.3f} caught {caught} norm {norm:.2f} "
        f"memory {memory:.1f} GiB waited {waited_s:.1f} s skipped {trainer.num_skipped}"
    )
    shown = " ".join(f"{domain} {mean:.2f}" for domain, (mean, _) in by_domain.items())
    answers = " ".join(
        f"{domain} {by_domain[domain][1]:.2f}"
        for domain in ("recall", "copy", "dialogue", "arithmetic", "json")
        if domain in by_domain
    )
    log.line(f"       {shown} | answers {answers} | load max/mean {max(imbalance):.2f}")
    log.record(
        progress=round(progress, 4),
        step=trainer.num_steps,
        tokens=trainer.num_tokens,
        tokens_per_s=round(tokens_per_s),
        phase=str(phase),
        rate=round(trainer.run.schedule.rate(progress), 4),
        loss={domain: round(mean, 4) for domain, (mean, _) in by_domain.items()},
        answer_loss={domain: round(answer, 4) for domain, (_, answer) in by_domain.items()},
        index_loss=round(float(result.index_loss), 4),
        caught=caught,
        gradient_norm=round(norm, 4),
        load_imbalance=[round(x, 3) for x in imbalance],
    )
    log.save()


def _check(log: RunLog, trainer: Trainer, tasks: Tasks, phase: Phase) -> None:
    """Recall and copy of the weights as they are, with the released selection sizes."""
    numerics = on_device(TRAINING, trainer.device)
    model = Model(trainer.parameters, trainer.run.arch, trainer.planner, numerics, trainer.device)
    distances = [d for d in (24, 128, 400, 900) if d + 70 <= phase.length]
    modes = [SelectionMode.SPARSE, SelectionMode.DENSE]
    scores = {
        mode.value: {str(d): exactness(model, tasks.recall(d, 32), mode, batch=32)
                     for d in distances}
        for mode in modes
    }  # fmt: skip
    copied = exactness(model, tasks.copy(16, 32), SelectionMode.SPARSE, batch=32)
    log.line(f"       recall {scores} copy-16 {copied:.2f}")
    log.record(recall=scores, copy_16=copied)


def start_parameters(
    arch: Architecture, seed: int, resume: Path | None, device: torch.device
) -> dict[str, Tensor]:
    """Random weights, or those of the master in folder `resume`.

    Raises:
        CheckpointError: the master does not fit the architecture.
    """
    if resume is None:
        return initial_parameters(arch, Part.BACKBONE, seed, device)
    return load_master(arch, Part.BACKBONE, sorted(resume.glob("*.safetensors")), device)


def run_header(run: Run, recipe: Recipe, device: torch.device) -> dict[str, object]:
    """Facts that the training log states."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"  # noqa: TID251
    return {
        "device": name,
        "torch": torch.__version__,
        "recipe": recipe.value,
        "minutes": run.minutes,
        "tokens_per_step": run.tokens_per_step,
        "seed": run.seed,
        "base_rate": run.base_rate,
        "speed": run.speed.to_fields(),
        "phases": [[phase.start, str(phase)] for phase in run.schedule.phases],
    }


def pick_device(name: str | None) -> torch.device:
    """The named device, or a GPU if there is one."""
    if name is not None:
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")  # noqa: TID251


def read_token_map(data: Path) -> Tensor:
    """[V] compressed token ids that belong to the tokenizer in the data folder."""
    return torch.from_numpy(np.load(data / "token_map.npy").astype(np.int64))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data")
    parser.add_argument("--config", type=Path, required=True, help="flat config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, required=True, help="training time")
    parser.add_argument("--resume", type=Path, help="folder of a master to start from")
    parser.add_argument("--speed", type=Path, help="JSON file that benchmark wrote")
    parser.add_argument("--tokens-per-step", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, min(6, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--device", help="default: cuda if present, else cpu")
    parser.add_argument("--report-every", type=float, default=_REPORT_EVERY_S, metavar="SECONDS")
    return parser.parse_args()


def main() -> int:
    """Train from the command line; 0 on success, 2 for bad input."""
    args = _parse()
    recipe = Recipe.SCRATCH if args.resume is None else Recipe.RESUME
    try:
        arch = Architecture.from_json(args.config)
        source = SequenceSource(args.data, arch.pad_token_id)
        run = Run(
            arch, SCHEDULES[recipe], args.minutes, args.tokens_per_step, args.seed,
            Speed.load(args.speed), report_every_s=args.report_every,
        )  # fmt: skip
        first = run.schedule.phases[0].length
        loader = Loader(source, args.seed, args.workers, first)
        device = pick_device(args.device)
        parameters = start_parameters(arch, args.seed, args.resume, device)
    except DeepInferError as error:
        sys.stderr.write(f"training cannot start: {error}\n")
        return 2
    log = RunLog(args.out / LOG_FILE, run_header(run, recipe, device))
    millions = sum(value.numel() for value in parameters.values()) / 1e6
    log.line(f"{log.content['device']}, {millions:.2f} M parameters, {run.speed}")
    tasks = Tasks(source.generators, args.data / "heldout", Split.DEV, seed=1)
    try:
        train(Trainer(run, parameters, read_token_map(args.data), device), loader, tasks, log,
              args.out)  # fmt: skip
    finally:
        loader.close()
    return 0


def master_files(folder: Path, stem: str = MASTER_STEM) -> list[Path]:
    """Files of the master in a run's folder."""
    return sorted(folder.glob(f"{stem}-*.safetensors"))


if __name__ == "__main__":
    raise SystemExit(main())
