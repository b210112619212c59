"""Which requests may come in, and what they become."""

from __future__ import annotations

import itertools
import secrets
import time

from deepinfer.cache.block_pool import blocks_for
from deepinfer.device.errors import RequestError
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.replay_rule import ReplayRule
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.text.tokenizer import TextTokenizer


class RequestIntake:
    """Checks what users ask against the model and the cache, and makes requests of it."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        replay: ReplayRule,
        *,
        vocab_size: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        never_token_ids: tuple[int, ...],
    ) -> None:
        """Nothing has come in.

        Args:
            tokenizer: of the checkpoint.
            replay: decides which rows a prompt runs.
            vocab_size: of the model.
            max_model_len: prompt and answer together.
            num_blocks: KV blocks there are.
            block_size: tokens of a block.
            never_token_ids: ids that no prompt may hold: placeholders of images.
        """
        self._tokenizer, self._replay = tokenizer, replay
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._num_blocks, self._block_size = num_blocks, block_size
        self._never = never_token_ids
        self._arrivals = itertools.count()

    def request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int,
        timeout_s: float | None,
        final_only: bool,
    ) -> Request:
        """A request with its sequences; arguments as in `LLMEngine.add_request`.

        Raises:
            RequestError: it can never be served; the message names field and value.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise RequestError(f"timeout_s={timeout_s}; expected seconds above 0, or none")
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(token_ids)
        params.check_against(self._vocab_size, self._max_model_len)
        request = Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            controls=RequestControls.of(params, self._vocab_size),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            priority=priority,
            arrival=next(self._arrivals),
            deadline_s=None if timeout_s is None else time.monotonic() + timeout_s,
            decoder_start=self._replay.decoder_start(len(token_ids), params),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            final_only=final_only,
        )
        request.sequences = [
            Sequence(
                request,
                index,
                list(token_ids),
                OutputText(self._tokenizer, params),
                max_len=self._longest(len(token_ids), params),
                rows=self._replay.cold(request.decoder_start),
                logprobs=None if params.logprobs is None else [],
            )
            for index in range(params.n)
        ]
        return request

    def _longest(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        if params.max_tokens is None:
            return self._max_model_len
        return min(self._max_model_len, num_prompt_tokens + params.max_tokens)

    def _check_prompt(self, token_ids: list[int]) -> None:
        vocab_size, limit = self._vocab_size, self._max_model_len
        if not token_ids:
            raise RequestError("prompt is empty; give at least one token")
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt holds token id {token_id}; expected ids from 0 to {vocab_size - 1}"
                )
            if token_id in self._never:
                raise RequestError(
                    f"prompt holds token id {token_id}, the image placeholder; this engine "
                    "serves text only"
                )
        if len(token_ids) >= limit:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens, max_model_len is {limit} for prompt and "
                f"answer together; expected at most {limit - 1}: shorten it or raise max_model_len"
            )
        pool = self._num_blocks
        needed = blocks_for(len(token_ids) + 1, self._block_size)
        if needed > pool:
            raise RequestError(
                f"KV capacity: a prompt of {len(token_ids)} tokens needs {needed} blocks of "
                f"{self._block_size} tokens, the cache has {pool}; shorten it or raise "
                "cache.memory"
            )
