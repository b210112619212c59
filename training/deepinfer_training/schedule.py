"""When a run does what: phases and learning rate by the share of its time that has passed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deepinfer_training.architecture import Architecture
from deepinfer_training.fake_quant import ANNEALING, TRAINING, Numerics
from deepinfer_training.indexer import Selection, SelectionMode


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a run.

    Attributes:
        start: share of the run at which it begins.
        length: tokens of a sequence.
        mode: which compressed rows are read.
        breadth: factor on the architecture's top-k and candidate blocks; it shrinks to 1, so that
            the attention learns to live with few rows step by step.
        quantized: weights, activations and caches are rounded as in the release.
    """

    start: float
    length: int
    mode: SelectionMode
    breadth: int = 1
    quantized: bool = False

    def selection(self, arch: Architecture) -> Selection:
        """Selection of this phase."""
        return Selection(
            self.mode, arch.index_topk * self.breadth, arch.candidate_topk_blocks * self.breadth
        )

    @property
    def numerics(self) -> Numerics:
        """What this phase rounds."""
        return ANNEALING if self.quantized else TRAINING

    def __str__(self) -> str:
        rows = self.mode.value if self.mode is SelectionMode.DENSE else f"top-k x{self.breadth}"
        return f"{self.length} tokens, {rows}{', quantised' if self.quantized else ''}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases and the shape of the learning rate.

    Attributes:
        phases: in order; the first starts at 0.
        peak: factor on every group's learning rate.
        warmup: share of the run with a rising rate.
        decay_start: share at which the rate begins to fall, linearly to 0.
        bias_rates: (share, rate) steps of the router bias update.
    """

    phases: tuple[Phase, ...]
    peak: float
    warmup: float
    decay_start: float
    bias_rates: tuple[tuple[float, float], ...]

    def phase(self, progress: float) -> Phase:
        """Phase at a share of the run."""
        return [phase for phase in self.phases if phase.start <= progress][-1]

    def rate(self, progress: float) -> float:
        """Factor on the learning rates."""
        rising = min(1.0, (progress + 0.0005) / self.warmup)
        falling = max(0.0, (1.0 - progress) / (1.0 - self.decay_start))
        return self.peak * min(rising, falling, 1.0)

    def bias_rate(self, progress: float) -> float:
        """Step of the router bias."""
        return [rate for start, rate in self.bias_rates if start <= progress][-1]


class Recipe(enum.Enum):
    """What a run starts from."""

    SCRATCH = "scratch"
    RESUME = "resume"


_DENSE, _SPARSE = SelectionMode.DENSE, SelectionMode.SPARSE
SCHEDULES = {
    Recipe.SCRATCH: Schedule(
        phases=(
            Phase(0.00, 256, _DENSE),
            Phase(0.12, 512, _DENSE),
            Phase(0.32, 1024, _DENSE),
            Phase(0.42, 1024, _SPARSE, breadth=4),
            Phase(0.50, 1024, _SPARSE, breadth=2),
            Phase(0.58, 1024, _SPARSE),
            Phase(0.80, 1024, _SPARSE, quantized=True),
        ),
        peak=1.0, warmup=0.02, decay_start=0.70,
        bias_rates=((0.0, 2e-3), (0.45, 5e-4), (0.80, 0.0)),
    ),
    Recipe.RESUME: Schedule(
        phases=(
            Phase(0.00, 1024, _SPARSE, breadth=2),
            Phase(0.20, 1024, _SPARSE),
            Phase(0.60, 1024, _SPARSE, quantized=True),
        ),
        peak=0.5, warmup=0.05, decay_start=0.35,
        bias_rates=((0.0, 5e-4), (0.60, 0.0)),
    ),
}  # fmt: skip
