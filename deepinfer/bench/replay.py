"""Bounded replay against running every row: counted work and measured time, by prompt length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from deepinfer.bench.work_counter import WorkCounter
from deepinfer.device.backend import Backend
from deepinfer.model.loading import LoadedModel
from deepinfer.model.prefill_run import Prefill
from deepinfer.model.prefill_work import prefill_macs
from deepinfer.model.replay import ALL_ROWS, PrefillRows, cold_rows, decoder_start


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """One prompt length; work in multiply-accumulates, times in microseconds.

    Attributes:
        num_tokens: prompt length.
        exact_macs: counted in the op calls when every layer runs every row.
        bounded_macs: counted in the op calls in bounded replay.
        exact_formula_macs: by formula, from the configuration alone.
        bounded_formula_macs: by formula.
        exact_us: least time of the repeats.
        bounded_us: least time of the repeats.
        launch_us: what a prompt of one token takes: work of the host and the device that does not
            depend on rows. It shows once in a prompt; later steps are issued while the device
            still computes the one before.
    """

    num_tokens: int
    exact_macs: int
    bounded_macs: int
    exact_formula_macs: int
    bounded_formula_macs: int
    exact_us: float
    bounded_us: float
    launch_us: float

    @property
    def counted_ratio(self) -> float:
        """Counted work of bounded replay over that of all rows."""
        return self.bounded_macs / self.exact_macs

    @property
    def formula_ratio(self) -> float:
        """The same by formula."""
        return self.bounded_formula_macs / self.exact_formula_macs

    @property
    def time_ratio(self) -> float:
        """Measured time of bounded replay over that of all rows."""
        return self.bounded_us / self.exact_us

    @property
    def row_time_ratio(self) -> float | None:
        """The same with `launch_us` taken off both; None where nothing is left of them."""
        bounded, exact = self.bounded_us - self.launch_us, self.exact_us - self.launch_us
        return bounded / exact if bounded > 0 and exact > 0 else None

    def to_json(self) -> dict[str, float | int | None]:
        """All fields and ratios."""
        return asdict(self) | {
            "counted_ratio": self.counted_ratio,
            "formula_ratio": self.formula_ratio,
            "time_ratio": self.time_ratio,
            "row_time_ratio": self.row_time_ratio,
        }


def measure_replay(
    loaded: LoadedModel,
    backend: Backend,
    counter: WorkCounter,
    *,
    lengths: Sequence[int],
    keep_tokens: int,
    chunk_tokens: int,
    repeats: int,
) -> Iterator[ReplayFigures]:
    """Figures of each prompt length, as they are known.

    Args:
        loaded: the model on `backend`; its ops are the counter's.
        backend: where it runs.
        counter: counts the first, untimed run of each kind.
        lengths: prompt lengths in tokens.
        keep_tokens: prompt tokens that the decoder runs in bounded replay.
        chunk_tokens: most rows of a step.
        repeats: timed runs of each kind; they alternate, so that a noisy machine hits both.
    """
    config = loaded.config
    prefill = Prefill(loaded, backend, max_tokens=max(lengths), chunk_tokens=chunk_tokens)
    ids = [(17 * i + i * i // 7) % (config.vocab_size - 16) + 5 for i in range(max(lengths))]

    def least_us(num_tokens: int, kinds: Sequence[PrefillRows]) -> list[float]:
        times = [[prefill.run(ids[:num_tokens], rows)[1] for rows in kinds] for _ in range(repeats)]
        return [min(column) for column in zip(*times, strict=True)]

    def counted(num_tokens: int, rows: PrefillRows) -> int:
        before, counter.running = counter.total, True
        prefill.run(ids[:num_tokens], rows)
        counter.running = False
        return counter.total - before

    prefill.run(ids[:1], ALL_ROWS)
    (one_step_us,) = least_us(1, [ALL_ROWS])
    for num_tokens in lengths:
        bounded = cold_rows(config, decoder_start(num_tokens, keep_tokens))
        exact_macs, bounded_macs = (counted(num_tokens, rows) for rows in (ALL_ROWS, bounded))
        exact_us, bounded_us = least_us(num_tokens, [ALL_ROWS, bounded])
        yield ReplayFigures(
            num_tokens=num_tokens,
            exact_macs=exact_macs,
            bounded_macs=bounded_macs,
            exact_formula_macs=prefill_macs(config, num_tokens, ALL_ROWS),
            bounded_formula_macs=prefill_macs(config, num_tokens, bounded),
            exact_us=exact_us,
            bounded_us=bounded_us,
            launch_us=one_step_us,
        )
