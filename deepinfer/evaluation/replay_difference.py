"""What bounded replay changes in the next-token distributions of held-out texts.

Each text is cut into windows of 1024 tokens that advance by 512. The first half of a window is a
prompt, run in bounded replay and with every row; the second half is read token by token as an
answer would be. Compared are the distributions of every token of the second half, so that it
shows how the difference fades with the distance from the prompt's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.config.replay import ReplayMode
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.registry import load_backend
from deepinfer.engine.replay_rule import ReplayRule
from deepinfer.evaluation.bits_per_byte import STRIDE_TOKENS, WINDOW_TOKENS, windows
from deepinfer.evaluation.heldout import heldout_names, read_heldout
from deepinfer.evaluation.score import ratio
from deepinfer.model.config import V41Config
from deepinfer.model.loading import load_model
from deepinfer.model.prefill_run import Prefill
from deepinfer.model.replay import ALL_ROWS, cold_rows, decoder_start
from deepinfer.text.tokenizer import TextTokenizer

# Tokens after the prompt: the first, then ranges whose ends grow fourfold.
DISTANCES = ((1, 1), (2, 8), (9, 32), (33, 128), (129, STRIDE_TOKENS))
OnWindow = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TextDifference:
    """Bits per byte of one text after bounded and after exact prompts.

    Attributes:
        text: its name.
        num_windows: windows compared.
        exact_bits_per_byte: of the second halves, every prompt row run.
        bounded_bits_per_byte: the same tokens after bounded prompts.
        difference_error: standard error of the difference over the windows; None for one.
    """

    text: str
    num_windows: int
    exact_bits_per_byte: float
    bounded_bits_per_byte: float
    difference_error: float | None


@dataclass(frozen=True, slots=True)
class DistanceDifference:
    """Divergence at some distance from the prompt's end, over all texts.

    Attributes:
        first: nearest token, 1 is the first after the prompt.
        last: farthest token.
        num_windows: windows that reach it.
        mean_kl: KL(exact || bounded) in nats, mean over tokens and windows.
        kl_error: standard error over windows; None for one.
        max_kl: the largest of one token.
        same_top_share: tokens whose most likely id is the same.
    """

    first: int
    last: int
    num_windows: int
    mean_kl: float
    kl_error: float | None
    max_kl: float
    same_top_share: float


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """Result: by text and by distance."""

    texts: list[TextDifference]
    distances: list[DistanceDifference]

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "texts": [asdict(entry) for entry in self.texts],
            "distances": [asdict(entry) for entry in self.distances],
        }


class WindowDifference(NamedTuple):
    """One window, token by token [m]: divergence, same most likely id; and its nats."""

    kl: Tensor
    same_top: Tensor
    exact_nats: float
    bounded_nats: float


def compare_logits(exact: Tensor, bounded: Tensor, targets: Tensor) -> WindowDifference:
    """Difference of two sets of logits.

    Args:
        exact: [m, V] fp32.
        bounded: [m, V] fp32.
        targets: [m] int64 tokens that followed.
    """
    p, q = exact.double().log_softmax(-1), bounded.double().log_softmax(-1)
    index = targets.unsqueeze(1)
    return WindowDifference(
        # Rounding can leave it a little below zero where both are the same.
        kl=(p.exp() * (p - q)).sum(-1).clamp_min(0.0),
        same_top=exact.argmax(-1) == bounded.argmax(-1),
        exact_nats=-float(p.gather(1, index).sum()),
        bounded_nats=-float(q.gather(1, index).sum()),
    )


def measure_replay_difference(
    config: EngineConfig, *, limit: int | None = None, on_window: OnWindow | None = None
) -> ReplayDifference:
    """Run every window both ways, directly on the model.

    Args:
        config: names backend, numerics, checkpoint and the kept tail.
        limit: most windows of a text; None: all.
        on_window: told text, windows done and windows of that text.
    Raises:
        ConfigError: the kept tail does not fit the model.
    """
    model = V41Config.from_json(config.checkpoint.directory)
    ReplayRule(config.replay.model_copy(update={"mode": ReplayMode.BOUNDED}), model)
    backend = load_backend(
        BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
    )
    try:
        random = config.checkpoint.seed if config.checkpoint.random_weights else None
        loaded = load_model(
            config.checkpoint.directory, backend, max_positions=WINDOW_TOKENS, random_seed=random
        )
        start = decoder_start(STRIDE_TOKENS, config.replay.keep_tokens)
        bounded_rows = cold_rows(loaded.config, start)
        tokenizer = TextTokenizer.from_directory(config.checkpoint.directory)
        prefill = Prefill(
            loaded,
            backend,
            max_tokens=WINDOW_TOKENS,
            chunk_tokens=config.scheduler.max_chunk_tokens,
        )
        texts: list[TextDifference] = []
        found: list[WindowDifference] = []
        for name in heldout_names():
            parts = _windows_of(name, tokenizer, limit)
            own: list[WindowDifference] = []
            for done, ids in enumerate(parts, start=1):
                num_logits = len(ids) - STRIDE_TOKENS
                exact, bounded = (
                    prefill.run(ids[:-1], rows, num_logits=num_logits)[0]
                    for rows in (ALL_ROWS, bounded_rows)
                )
                own.append(compare_logits(exact, bounded, torch.tensor(ids[STRIDE_TOKENS:])))
                if on_window is not None:
                    on_window(name, done, len(parts))
            texts.append(_text_difference(name, own, parts, tokenizer))
            found += own
        return ReplayDifference(texts, by_distance(found))
    finally:
        backend.close()


def _windows_of(name: str, tokenizer: TextTokenizer, limit: int | None) -> list[list[int]]:
    """Token ids of the windows that have a second half."""
    text = read_heldout(name)
    if limit is not None:
        # More than the windows need, so that the cut falls behind them.
        text = text[: 16 * WINDOW_TOKENS * (limit + 1)]
    ids = tokenizer.encode(text, add_bos=True)
    parts = [ids[start:stop] for start, _, stop in windows(len(ids))]
    return [part for part in parts if len(part) > STRIDE_TOKENS][:limit]


def _text_difference(
    name: str,
    found: Sequence[WindowDifference],
    parts: Sequence[list[int]],
    tokenizer: TextTokenizer,
) -> TextDifference:
    sizes = [
        float(sum(len(tokenizer.token_bytes(token)) for token in ids[STRIDE_TOKENS:]))
        for ids in parts
    ]
    exact, bounded = (
        [nats / math.log(2) for nats in column]
        for column in zip(*((w.exact_nats, w.bounded_nats) for w in found), strict=True)
    )
    _, error = ratio([b - e for b, e in zip(bounded, exact, strict=True)], sizes)
    return TextDifference(name, len(found), ratio(exact, sizes)[0], ratio(bounded, sizes)[0], error)


def by_distance(found: Sequence[WindowDifference]) -> list[DistanceDifference]:
    """Divergence of the windows at each of `DISTANCES` that any of them reaches."""
    result = []
    for first, last in DISTANCES:
        reached = [w for w in found if w.kl.shape[0] >= first]
        if not reached:
            continue
        kl = [w.kl[first - 1 : last] for w in reached]
        means = [float(part.mean()) for part in kl]
        mean, error = ratio(means, [1.0] * len(means))
        same = torch.cat([w.same_top[first - 1 : last] for w in reached])
        result.append(
            DistanceDifference(
                first,
                last,
                len(reached),
                mean,
                error,
                max(float(part.max()) for part in kl),
                float(same.double().mean()),
            )
        )
    return result
