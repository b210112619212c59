"""The configuration of an engine: sections, sources, presets.

config = load_config(["tiny/reference"], ["cache.block_size=32"], os.environ)
"""

from __future__ import annotations

from deepinfer.config.engine_config import EngineConfig
from deepinfer.config.load import Assignment, dump, load_config, override
from deepinfer.config.presets import bundled_checkpoint, find_preset, load_model_preset

__all__ = [
    "Assignment",
    "EngineConfig",
    "bundled_checkpoint",
    "dump",
    "find_preset",
    "load_config",
    "load_model_preset",
    "override",
]
