"""Section `scheduler`: how many requests and tokens one step may hold."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from deepinfer.config.section import Section


class SchedulerSection(Section):
    """Limits of one step, and how many steps are in flight at once."""

    async_depth: Literal[0, 1, 2] = Field(
        default=1,
        description="the number of steps launched ahead of the collected one: 0, 1 or 2",
    )
    max_num_seqs: int = Field(
        default=64, ge=1, description="the most sequences in a step, a whole number from 1"
    )
    max_num_tokens: int = Field(
        default=512, ge=1, description="the most tokens in a step, a whole number from 1"
    )
    prefill_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="the most prompt tokens of one sequence in a step, from 1 to max_num_tokens; "
        "null = max_num_tokens",
    )
    prefill_wait_steps: int = Field(
        default=16,
        ge=0,
        description="the most steps that requests wait, once no room was left for the next one, "
        "until an eighth of the running ones has ended; 0 admits each as soon as it fits",
    )

    @model_validator(mode="after")
    def _check_limits_agree(self) -> Self:
        if self.max_num_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} is below max_num_seqs {self.max_num_seqs}, "
                "but a decode step holds a token of every sequence; raise the first or lower the "
                "second"
            )
        chunk = self.prefill_chunk_tokens
        if chunk is not None and chunk > self.max_num_tokens:
            raise ValueError(
                f"prefill_chunk_tokens {chunk} is above max_num_tokens {self.max_num_tokens}, so "
                "no such chunk fits a step; lower the first or raise the second"
            )
        return self

    @property
    def max_chunk_tokens(self) -> int:
        """The most prompt tokens of one sequence in a step."""
        return self.prefill_chunk_tokens or self.max_num_tokens
