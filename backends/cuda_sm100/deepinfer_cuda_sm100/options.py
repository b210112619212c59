"""`backend.options` of cuda_sm100."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer.device.errors import ConfigError


class EngramPlace(enum.Enum):
    """Where Engram tables lie."""

    DEVICE = "device"
    """In device memory."""
    HOST = "host"
    """In pinned host memory, read by the device over the bus."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """What the user may choose.

    Attributes:
        interpret: run the kernels in Triton's interpreter on the CPU; for checking, not speed.
        block_scaled: give codes and scales of quantised products to the tensor cores, which SM100
            has instructions for; not in the interpreter.
        engram_tables: where Engram tables are placed.
        device_index: number of the GPU.
        graphs: replay decode steps as CUDA graphs.
        poison_released: overwrite released cache rows with NaN (a test mode).
    """

    interpret: bool = False
    block_scaled: bool = False
    engram_tables: EngramPlace = EngramPlace.DEVICE
    device_index: int = 0
    graphs: bool = True
    poison_released: bool = False

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> CudaOptions:
        """Checked options.

        Raises:
            ConfigError: an option is unknown or has a value outside its range.
        """
        known = (
            "block_scaled",
            "device_index",
            "engram_tables",
            "graphs",
            "interpret",
            "poison_released",
        )
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(
                f"backend.options.{unknown[0]} is unknown to the cuda_sm100 backend; it has "
                f"{', '.join(known)}"
            )
        index = options.get("device_index", 0)
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ConfigError(
                f"backend.options.device_index is {index!r}; expected a GPU's number, 0 or above"
            )
        places = [place.value for place in EngramPlace]
        place = options.get("engram_tables", EngramPlace.DEVICE.value)
        if place not in places:
            raise ConfigError(
                f"backend.options.engram_tables is {place!r}; expected one of {places}"
            )
        interpret = _flag(options, "interpret", default=False)
        block_scaled = _flag(options, "block_scaled", default=False)
        if interpret and block_scaled:
            raise ConfigError(
                "backend.options.block_scaled is true together with interpret: Triton's "
                "interpreter has no block-scaled products; leave one of them out"
            )
        return cls(
            interpret=interpret,
            block_scaled=block_scaled,
            engram_tables=EngramPlace(place),
            device_index=index,
            graphs=_flag(options, "graphs", default=True),
            poison_released=_flag(options, "poison_released", default=False),
        )


def _flag(options: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"backend.options.{name} is {value!r}; expected true or false")
    return value
