"""Error classes of the project; backends and engine share them.

Every message says what happened, the values with their names, what was expected and what to do.
"""

from __future__ import annotations


class DeepInferError(Exception):
    """Base of every error that DeepInfer raises on purpose."""


class ConfigError(DeepInferError):
    """A configuration value is unknown, malformed, contradictory or not supported."""


class CheckpointError(DeepInferError):
    """A checkpoint is incomplete, damaged, or does not match its own configuration."""


class CapabilityError(DeepInferError):
    """The chosen backend cannot do what the model or the configuration needs."""


class DeviceMemoryError(DeepInferError):
    """Work was issued that the device's free memory does not hold; nobody waits for its results."""


class ContractError(DeepInferError):
    """An op or a runtime call was given arguments outside its contract."""


class RequestError(DeepInferError):
    """One request is invalid or cannot be served; other requests are not affected."""


class RankError(DeepInferError):
    """A rank of a group failed, stalled or disagreed with the others."""
