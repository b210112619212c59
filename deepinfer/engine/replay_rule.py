"""Which rows a request's prefill runs, from the configuration and the request alone.

Nothing about batch, chunks, memory or time enters: what a request's answer is computed from is
fixed when the request comes in. Only windows that are rebuilt in mode bounded after a prefix hit
depend on where the hit ends, and so on what was cached.
"""

from __future__ import annotations

from deepinfer.config.replay import ReplayMode, ReplaySection
from deepinfer.device.errors import ConfigError
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.config import V41Config
from deepinfer.model.replay import (
    PrefillRows,
    bounded_rows,
    cold_rows,
    decoder_start,
    exact_rows,
    resumed_rows,
)


class ReplayRule:
    """Section `replay`, applied to a model."""

    def __init__(self, section: ReplaySection, model: V41Config) -> None:
        """Check the section against the model.

        Raises:
            ConfigError: mode bounded, and the kept tail is shorter than a window, or no layer
                comes after a last KV source.
        """
        self._section, self._model = section, model
        if section.mode is ReplayMode.EXACT:
            return
        if section.keep_tokens < model.sliding_window:
            raise ConfigError(
                f"replay.keep_tokens = {section.keep_tokens} is less than the model's window of "
                f"{model.sliding_window} tokens, so the first answers would see a window with "
                f"holes; expected at least {model.sliding_window}"
            )
        source = model.last_kv_source
        if source is None or source == model.num_hidden_layers - 1:
            raise ConfigError(
                "replay.mode = 'bounded' leaves out layers after the last KV source, and this "
                f"model has none (compress_ratios {list(model.compress_ratios)}); set "
                "replay.mode=exact"
            )

    def decoder_start(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """First prompt position that layers after the last KV source run.

        A request that wants something of every prompt row keeps them all.
        """
        if self._section.mode is ReplayMode.EXACT or params.prompt_logprobs is not None:
            return 0
        return decoder_start(num_prompt_tokens, self._section.keep_tokens)

    def cold(self, start: int) -> PrefillRows:
        """Rows of a prompt of which nothing is cached; `start` from `decoder_start`."""
        return cold_rows(self._model, start)

    def resumed(self, first: int, num_hit_tokens: int, start: int) -> PrefillRows:
        """Rows of a prompt that begins with cached blocks, with its windows at hand.

        Args:
            first: first position to compute.
            num_hit_tokens: cached positions, at least `first`.
            start: from `decoder_start`.
        """
        return resumed_rows(self._model, first, num_hit_tokens, start)

    def after_hit(self, num_hit_tokens: int, start: int, *, drafts: bool) -> PrefillRows:
        """Rows of a prompt that begins with cached blocks; the first is where computing begins.

        Args:
            num_hit_tokens: cached positions, at least a window.
            start: from `decoder_start`.
            drafts: whether a drafter's window is to be filled, too.
        """
        if self._section.rebuild is ReplayMode.BOUNDED:
            return bounded_rows(self._model, num_hit_tokens, start)
        num_final_rows = self._model.sliding_window if drafts else 1
        return exact_rows(self._model, num_hit_tokens, start, num_final_rows=num_final_rows)
