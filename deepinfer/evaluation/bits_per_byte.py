"""Bits per byte of the held-out texts.

A text begins with the begin token and is scored in windows of 1024 tokens that advance by 512;
the first counts all its tokens, every other one its last 512, so that each token is counted once
and has at least 512 tokens before it, or all there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deepinfer.device.errors import ConfigError
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.evaluation.heldout import heldout_names, read_heldout
from deepinfer.evaluation.job import control_name
from deepinfer.evaluation.score import Score, ratio
from deepinfer.model.controls import Controls
from deepinfer.text.tokenizer import TextTokenizer

WINDOW_TOKENS = 1024
STRIDE_TOKENS = 512
TASK = "bpb"
# Prompt tokens are scored; the one token that a request has to generate is thrown away.
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def windows(num_tokens: int) -> list[tuple[int, int, int]]:
    """(start, first counted token, stop) of every window over `num_tokens`, begin token included.

    Counted ranges follow each other and cover all tokens but the begin token.
    """
    found, start, counted = [], 0, 1
    while True:
        stop = min(start + WINDOW_TOKENS, num_tokens)
        found.append((start, counted, stop))
        if stop == num_tokens:
            return found
        start, counted = start + STRIDE_TOKENS, stop


class BitsPerByte:
    """The windows of all held-out texts as requests for prompt log probabilities."""

    task = TASK

    def __init__(
        self, tokenizer: TextTokenizer, *, controls: Controls, limit: int | None = None
    ) -> None:
        """Cut the texts.

        Args:
            tokenizer: of the checkpoint.
            controls: what the engine has out of action.
            limit: most windows of a text; None: all.
        Raises:
            ConfigError: the tokenizer has no begin token.
        """
        bos = tokenizer.bos_token_id
        if bos is None:
            raise ConfigError(
                "bits per byte start from the begin token; this checkpoint names none"
            )
        self.controls = controls
        self.prompts: list[list[int]] = []
        self._places: list[tuple[str, int, int]] = []  # text, first counted token, counted bytes
        for name in heldout_names():
            text = read_heldout(name)
            if limit is not None:
                # More than the windows need, so that the cut falls behind them.
                text = text[: 16 * WINDOW_TOKENS * (limit + 1)]
            ids = [bos, *tokenizer.encode(text, add_bos=False)]
            for start, counted, stop in windows(len(ids))[:limit]:
                self.prompts.append(ids[start:stop])
                num_bytes = sum(len(tokenizer.token_bytes(token)) for token in ids[counted:stop])
                self._places.append((name, counted - start, num_bytes))
        self.params = [_PARAMS] * len(self.prompts)

    def scores(self, results: Sequence[RequestOutput]) -> list[Score]:
        """One score per text."""
        bits: dict[str, list[float]] = {}
        num_bytes: dict[str, list[float]] = {}
        for (name, first, size), nats in zip(self._places, self._nats(results), strict=True):
            bits.setdefault(name, []).append(nats / math.log(2))
            num_bytes.setdefault(name, []).append(size)
            assert first >= 1  # the begin token has no probability
        scores = []
        for name, parts in bits.items():
            value, error = ratio(parts, num_bytes[name])
            control = control_name(self.controls)
            scores.append(Score(TASK, name, control, "bits_per_byte", len(parts), value, error))
        return scores

    def answers(self, results: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Nats and bytes of every window."""
        return [
            {"group": name, "nats": nats, "bytes": size}
            for (name, _, size), nats in zip(self._places, self._nats(results), strict=True)
        ]

    def _nats(self, results: Sequence[RequestOutput]) -> list[float]:
        """Negative log probability of each window's counted tokens."""
        nats = []
        for (_, first, _), result in zip(self._places, results, strict=True):
            assert result.prompt_logprobs is not None  # asked for
            counted = result.prompt_logprobs[first:]
            nats.append(-math.fsum(entry.logprob for entry in counted if entry is not None))
        return nats
