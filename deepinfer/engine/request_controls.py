"""A request's parameters in the form in which every one of its rows needs them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepinfer.device.ops.sampling import SampleWork
from deepinfer.engine.sampling_params import SamplingParams

PLAIN_CHOICE = (0.0, 1.0, 0.0)
"""Temperature, top_p and min_p of a row that takes the most likely token."""
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


class RequestControls(NamedTuple):
    """What a request's parameters say about every row of it, worked out once.

    Attributes:
        reals: temperature (0 when greedy), top_p, min_p and the three penalties.
        top_k: tokens kept; 0 keeps all.
        work: what its rows need of the sampler.
        has_penalties: whether the tokens so far change what comes next.
        is_free: whether no token is ever removed or biased for the request itself.
    """

    reals: tuple[float, ...]
    top_k: int
    work: SampleWork
    has_penalties: bool
    is_free: bool

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> RequestControls:
        """The controls of a request for a model of `vocab_size` tokens."""
        penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        is_free = not (
            params.min_tokens or params.logit_bias or params.allowed_token_ids is not None
        )
        if params.is_greedy:
            reals = (*PLAIN_CHOICE, *penalties)
            return cls(reals, 0, SampleWork.GREEDY, params.has_penalties, is_free)
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        work = SampleWork.SORTED if top_k or params.top_p < 1.0 else SampleWork.RANDOM
        # Beyond float32 the temperature would be infinite, and -inf divided by it NaN.
        temperature = min(params.temperature, _LARGEST_FLOAT32)
        reals = (temperature, params.top_p, params.min_p, *penalties)
        return cls(reals, top_k, work, params.has_penalties, is_free)
