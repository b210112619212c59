"""The whole configuration of an engine."""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from deepinfer.config.availability import check_available
from deepinfer.config.backend import BackendSection
from deepinfer.config.cache import CacheSection
from deepinfer.config.checkpoint import CheckpointSection
from deepinfer.config.explain import explain_errors
from deepinfer.config.measurement import MeasurementSection
from deepinfer.config.origins import Origins
from deepinfer.config.replay import ReplaySection
from deepinfer.config.scheduler import SchedulerSection
from deepinfer.config.section import Section
from deepinfer.config.speculation import SpeculationMode, SpeculationSection
from deepinfer.device.errors import ConfigError, RequestError
from deepinfer.device.numerics import Determinism, Numerics

_DEPLOYMENT = re.compile(r"single|ep[1-9][0-9]*|1p1d|1e1p1d")


class EngineConfig(Section):
    """Everything an engine is told before it starts; a bad value raises ConfigError."""

    backend: BackendSection = Field(default_factory=BackendSection, description="a section")
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="a section"
    )
    numerics: Numerics = Field(
        default=Numerics.NORMATIVE, strict=False, description="exact or normative"
    )
    determinism: Determinism = Field(
        default=Determinism.OFF,
        strict=False,
        description="off, batch_invariant or deterministic",
    )
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection, description="a section")
    cache: CacheSection = Field(default_factory=CacheSection, description="a section")
    speculation: SpeculationSection = Field(
        default_factory=SpeculationSection, description="a section"
    )
    replay: ReplaySection = Field(default_factory=ReplaySection, description="a section")
    measurement: MeasurementSection = Field(
        default_factory=MeasurementSection, description="a section"
    )
    deploy: str = Field(default="single", description="single, epN (ep8), 1p1d or 1e1p1d")
    sampling: dict[str, Any] = Field(
        default_factory=dict,
        description="default sampling parameters of requests (temperature, top_p, max_tokens, ...)",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="the most tokens of a request, prompt and answer together, from 1; "
        "null = what the model allows",
    )

    @field_validator("deploy")
    @classmethod
    def _check_deployment(cls, value: str) -> str:
        if not _DEPLOYMENT.fullmatch(value):
            raise ValueError("is not the name of a deployment")
        return value

    @field_validator("sampling")
    @classmethod
    def _check_sampling(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value:
            # Only here, so that a configuration without defaults loads without the engine.
            from deepinfer.engine.sampling_params import SamplingParams

            try:
                SamplingParams(**value)
            except RequestError as error:
                raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _check_drafts_are_reproducible(self) -> Self:
        dynamic = self.speculation.mode is SpeculationMode.DYNAMIC
        if dynamic and self.determinism is Determinism.DETERMINISTIC:
            raise ValueError(
                "determinism = deterministic and speculation.mode = dynamic exclude each other: "
                "how many drafts of a request are verified depends on its company and on measured "
                "times, and with it which random numbers choose its tokens; set "
                "speculation.mode=fixed or determinism=batch_invariant"
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _raise_own_errors(
        cls, values: object, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        origins: Origins = info.context or {}
        try:
            config = handler(values)
        except ValidationError as error:
            raise ConfigError(explain_errors(cls, error, origins)) from None
        check_available(config, origins)
        return config
