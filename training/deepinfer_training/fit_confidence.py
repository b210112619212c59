"""Fit the confidence head to what greedy decoding accepts, and calibrate it.

    python -m deepinfer_training.fit_confidence --data DATA --config CONFIG --run RUN \\
        --checkpoint CHECKPOINT

The drafter's training teaches the head the overlap of two distributions at temperature 1, on text
drawn at several temperatures. Here the engine writes greedy answers with the exported checkpoint,
in normative numerics, and the head learns which drafts they accept: a logistic regression that
starts at the trained head, or at 0, and pays for calibration errors. Writes
RUN/drafter-*.safetensors anew (the head is all that changes) and RUN/sts.json; export again
afterwards. Needs the engine, no GPU.

The answers, which depend on the backbone alone, are kept in RUN/answers-*.json: `--answers-only`
writes them on another machine, with `--backend cuda_sm100` in seconds. The drafts along them are
kept in RUN/rollouts-*.safetensors, 0.4 MB a prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from deepinfer.device.errors import ConfigError, DeepInferError
from deepinfer.engine.outputs import RequestOutput
from deepinfer_training import calibration, fake_quant
from deepinfer_training import rollouts as greedy
from deepinfer_training.architecture import Architecture
from deepinfer_training.calibration import Rollouts
from deepinfer_training.drafter import confidence_name
from deepinfer_training.evaluation import Model
from deepinfer_training.parameters import Part, load_master, save_master
from deepinfer_training.sequence_plan import Planner
from deepinfer_training.sequences import DOMAINS, SequenceSource, Split
from deepinfer_training.tasks import dump
from deepinfer_training.train import master_files, read_token_map
from deepinfer_training.train_drafter import DRAFTER_STEM
from deepinfer_training.weights import rounded_parameters

# The weights below were chosen on a quarter of the TRAIN answers, the head fitted to the others.
_SEEDS = {Split.TRAIN: 11, Split.DEV: 12}
# Pulls towards the start: some hundred thousand places must not turn 288 weights freely.
_STAY_WEIGHT = 0.001
# A linear head without bias fits the likelihood best where it is off by some percent for some
# confidences; being off is a loss of its own.
_CALIBRATION_WEIGHT = 1.0
_NUM_BINS, _BIN_WIDTH, _PENALISED_SLOTS = 15, 0.05, 3
_STEPS = 100
_SHOW_EVERY_S = 10.0


def fit_head(rollouts: Rollouts, start: Tensor) -> Tensor:
    """Weight [1, N] whose sigmoid tells how likely a draft is accepted if those before it are.

    Args:
        rollouts: what was accepted.
        start: [1, N] the head so far.
    """
    judged, counted = rollouts.judged(), rollouts.num_left > 0
    scale = rollouts.features[judged].square().mean(0).sqrt().clamp_min(1e-6)
    features, right = rollouts.features[judged] / scale, rollouts.right()[judged].float()
    everywhere, happened = rollouts.features[counted] / scale, rollouts.right()[counted].float()
    left, origin = rollouts.num_left[counted], start.squeeze(0) * scale
    weight = origin.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([weight], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(features @ weight, right)
        value = value + _STAY_WEIGHT * (weight - origin).square().sum()
        survival = torch.sigmoid(everywhere @ weight).cumprod(1)
        for slot in range(min(_PENALISED_SLOTS, survival.shape[1])):
            there = left > slot
            gap = _squared_gap(survival[there, slot], happened[there, slot])
            value = value + _CALIBRATION_WEIGHT * gap
        value.backward()
        return value

    optimizer.step(loss)
    return (weight.detach() / scale).unsqueeze(0)


def _squared_gap(probability: Tensor, happened: Tensor) -> Tensor:
    """Squared calibration error of [N] probabilities over soft bins, so that it has a gradient."""
    centres = (torch.arange(_NUM_BINS) + 0.5) / _NUM_BINS
    distance = (probability.detach().unsqueeze(1) - centres) / _BIN_WIDTH
    share = torch.softmax(-0.5 * distance.square(), dim=1)
    gaps = (share * (probability - happened).unsqueeze(1)).mean(0)
    return gaps.square().sum() * _NUM_BINS


class AnswerCount:
    """Prints how many answers there are, every few seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._shown = time.monotonic()

    def add(self, _: RequestOutput) -> None:
        """One more."""
        self._done += 1
        now = time.monotonic()
        if now - self._shown >= _SHOW_EVERY_S or self._done == self._total:
            self._shown = now
            sys.stdout.write(f"          {self._done} of {self._total} prompts answered\n")
            sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Answered:
    """Prompts of all domains and the target's greedy answers.

    Attributes:
        asked: prompts.
        answers: of the same order.
        domains: number of each prompt's domain.
    """

    asked: list[list[int]]
    answers: list[list[int]]
    domains: list[int]

    @classmethod
    def of_split(
        cls, source: SequenceSource, checkpoint: Path, split: Split, per_domain: int,
        max_tokens: int, backend: str,
    ) -> Answered:  # fmt: skip
        """Ask the engine.

        Args:
            source: of the prompts.
            checkpoint: export of the backbone.
            split: of the prompts.
            per_domain: prompts of each domain.
            max_tokens: length of an answer.
            backend: that answers.
        Raises:
            DeepInferError: checkpoint or backend cannot be had, or a prompt is refused.
        """
        asked, domains = greedy.prompts(
            source.generators, source.natural, split, _SEEDS[split], per_domain
        )
        tell = AnswerCount(len(asked)).add
        answers = greedy.greedy_answers(checkpoint, asked, max_tokens, tell, backend=backend)
        return cls(asked, answers, domains.tolist())

    @classmethod
    def load(cls, file: Path) -> Answered:
        """Read what `save` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def check(self, file: Path, per_domain: int, max_tokens: int) -> None:
        """Refuse answers to something else than is asked for.

        Raises:
            ConfigError: `file`, which they are from, has more or fewer, or longer ones.
        """
        count, wanted = len(self.asked), per_domain * len(DOMAINS)
        if count != wanted:
            raise ConfigError(
                f"{file} has {count} answers, per_domain {per_domain} asks for {wanted}; remove it "
                f"or give --per-domain {count // len(DOMAINS)}"
            )
        if (longest := max(map(len, self.answers))) > max_tokens:
            raise ConfigError(
                f"{file} has answers of {longest} tokens, max_tokens is {max_tokens}; remove it"
            )

    def save(self, file: Path) -> None:
        """Write a JSON file."""
        file.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


class Fitter:
    """The frozen model, in the engine's normative numerics, and its drafter."""

    def __init__(self, arch: Architecture, token_map: Tensor, run: Path) -> None:
        """Load the masters of a run.

        Raises:
            CheckpointError: one is missing or does not fit.
        """
        device = torch.device("cpu")
        backbone = load_master(arch, Part.BACKBONE, master_files(run), device)
        self.drafter = load_master(arch, Part.DRAFTER, master_files(run, DRAFTER_STEM), device)
        self._target = Model(
            rounded_parameters(backbone), arch, Planner(arch, token_map, device),
            fake_quant.NORMATIVE, device,
        )  # fmt: skip
        self._name = confidence_name(arch)

    @property
    def head(self) -> Tensor:
        """[1, N] weight of the confidence head."""
        return self.drafter[self._name].detach()

    def rollouts(self, answered: Answered) -> Rollouts:
        """The drafts along greedy answers."""
        shared = {name: self._target.parameters[name] for name in ("embed.weight", "head.weight")}
        parameters = {**rounded_parameters(self.drafter), **shared}
        return greedy.draft_over(
            self._target, parameters, answered.asked, answered.answers,
            torch.tensor(answered.domains),
        )  # fmt: skip

    def forget(self) -> None:
        """Set the head to 0, which says 1/2 of everything."""
        self.drafter[self._name] = torch.zeros_like(self.head)

    def fit(self, rollouts: Rollouts) -> None:
        """Replace the confidence head; it is stored in bf16."""
        self.drafter[self._name] = fit_head(rollouts, self.head).to(torch.bfloat16).float()


def main() -> int:
    """Fit from the command line; 0 on success, 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data")
    parser.add_argument("--config", type=Path, required=True, help="flat config.json")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--checkpoint", type=Path, required=True, help="its export")
    parser.add_argument("--per-domain", type=int, default=160, help="prompts of each domain")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--backend", default="reference", help="that answers")
    parser.add_argument(
        "--fresh", action="store_true", help="start the head at 0, not where training left it"
    )
    parser.add_argument("--answers-only", action="store_true", help="write the answers and stop")
    args = parser.parse_args()
    started = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - started:6.1f}s] {text}\n")
        sys.stdout.flush()

    def answered(split: Split, what: str) -> Answered:
        kept = args.run / f"answers-{split.name.lower()}.json"
        if kept.is_file():
            say(f"answers to {what}: those of {kept}; remove it after a change of the backbone")
            made = Answered.load(kept)
            made.check(kept, args.per_domain, args.max_tokens)
            return made
        say(f"answers to {what}: {args.per_domain} prompts of each domain")
        made = Answered.of_split(
            source, args.checkpoint, split, args.per_domain, args.max_tokens, args.backend
        )
        made.save(kept)
        return made

    try:
        arch = Architecture.from_json(args.config)
        source = SequenceSource(args.data, arch.pad_token_id)
        answers = {
            Split.DEV: answered(Split.DEV, "measure on"),
            Split.TRAIN: answered(Split.TRAIN, "learn from"),
        }
        if args.answers_only:
            return 0
        fitter = Fitter(arch, read_token_map(args.data), args.run)
        found = {}
        for split, given in answers.items():
            side = arch.confidence_head_input
            kept = args.run / f"rollouts-{split.name.lower()}-{side}.safetensors"
            if kept.is_file():
                say(f"drafts: those of {kept}; remove it after a change of the drafter")
                found[split] = Rollouts(**load_file(kept))
                if (count := len(found[split].accepted)) != len(given.asked):
                    raise ConfigError(
                        f"{kept} has drafts along {count} answers, there are {len(given.asked)}; "
                        "remove it"
                    )
                continue
            say(f"drafts along {len(given.asked)} answers")
            found[split] = fitter.rollouts(given)
            save_file(found[split].tensors(), kept)
    except DeepInferError as error:
        sys.stderr.write(f"fitting cannot go on: {error}\n")
        return 2
    held, learnt = found[Split.DEV], found[Split.TRAIN]
    if args.fresh:
        fitter.forget()
    started_at = calibration.measure(learnt, held, fitter.head, DOMAINS)
    say(f"head before: {started_at}")
    fitter.fit(learnt)
    fitted = calibration.measure(learnt, held, fitter.head, DOMAINS)
    say(f"fitted head: {fitted}")
    save_master(fitter.drafter, args.run, DRAFTER_STEM)
    content = {
        "method": "logistic regression of the head on greedy answers with a penalty on calibration "
        "errors, then sequential temperature scaling: 41 values in [0.1, 10], 15-bin ECE",
        "dataset": f"greedy answers, normative numerics: {len(answers[Split.TRAIN].asked)} TRAIN "
        f"prompts for head and temperatures, {len(answers[Split.DEV].asked)} DEV prompts to "
        f"measure, as many of each of {len(DOMAINS)} domains",
        **fitted,
        "head_before": "0"
        if args.fresh
        else {key: started_at[key] for key in ("ece_before", "ece_after", "auroc")},
    }
    dump(content, args.run / "sts.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
