"""Section `replay`: which rows of a prompt are run, and which run again after a prefix hit."""

from __future__ import annotations

import enum

from pydantic import Field

from deepinfer.config.section import Section


class ReplayMode(enum.Enum):
    """EXACT runs every layer on the whole prompt; BOUNDED only the tail in the decoder half."""

    EXACT = "exact"
    BOUNDED = "bounded"


class AfterHit(enum.Enum):
    """What becomes of full blocks whose rows saw windows that were rebuilt in mode bounded.

    Their content differs slightly from what a run from the start writes. PUBLISH keeps them for
    other prompts, as serving engines do; MARK keeps them, counts hits on them apart and marks the
    results that follow them; WITHHOLD does not keep them, so that every cached block is one of a
    cold run.
    """

    PUBLISH = "publish"
    MARK = "mark"
    WITHHOLD = "withhold"


class ReplaySection(Section):
    """Bounded replay. Its kept tail must cover the model's window, which the model checks."""

    mode: ReplayMode = Field(default=ReplayMode.EXACT, strict=False, description="exact or bounded")
    rebuild: ReplayMode = Field(
        default=ReplayMode.EXACT,
        strict=False,
        description=(
            "exact or bounded rebuilding of windows after a prefix hit; bounded is cheaper, and "
            "lets answers depend on what is cached and on preemption"
        ),
    )
    publish_after_hit: AfterHit = Field(
        default=AfterHit.PUBLISH,
        strict=False,
        description="publish, mark or withhold blocks computed on windows rebuilt in mode bounded",
    )
    keep_tokens: int = Field(
        default=140,
        ge=1,
        description="the last prompt tokens that the decoder half runs in mode bounded, from 1",
    )
