"""Packing one layer's parameters through the backend, by checkpoint name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.errors import CheckpointError
from deepinfer.device.handles import ExpertWeights, GroupedWeight, LinearWeight
from deepinfer.device.ops.mhc import MhcWeights
from deepinfer.device.weights import Parameters, StoredTensor


class Packer:
    """Looks parameters up under a prefix and hands them to the backend."""

    def __init__(self, backend: Backend, parameters: Parameters, prefix: str = "") -> None:
        self._backend = backend
        self._parameters = parameters
        self._prefix = prefix

    def under(self, prefix: str) -> Packer:
        """A packer whose names start with one more `prefix`."""
        return Packer(self._backend, self._parameters, self._prefix + prefix)

    def stored(self, name: str) -> StoredTensor:
        """The logical parameter.

        Raises:
            CheckpointError: there is none of that name.
        """
        full = self._prefix + name
        if full not in self._parameters:
            raise CheckpointError(
                f"parameter {full} is missing; the checkpoint (or the parameters given) does "
                "not fit the configuration"
            )
        return self._parameters[full]

    def linear(self, *names: str) -> LinearWeight:
        """Matrices that share their input, packed side by side."""
        return self._backend.pack_linear([self.stored(name) for name in names])

    def grouped(self, name: str, num_groups: int) -> GroupedWeight:
        return self._backend.pack_grouped(self.stored(name), num_groups)

    def vector(self, name: str) -> Tensor:
        return self._backend.pack_vector(self.stored(name))

    def experts(self, experts: Sequence[int]) -> ExpertWeights:
        """Routed experts `experts.E.w1|w3|w2` in the given physical order."""
        return self._backend.pack_experts(
            [self.stored(f"experts.{e}.w1.weight") for e in experts],
            [self.stored(f"experts.{e}.w3.weight") for e in experts],
            [self.stored(f"experts.{e}.w2.weight") for e in experts],
        )

    def mhc(self, name: str) -> MhcWeights:
        """Mixing parameters `hc_NAME_fn|scale|base`."""
        return MhcWeights(
            self.vector(f"hc_{name}_fn"),
            self.vector(f"hc_{name}_scale"),
            self.vector(f"hc_{name}_base"),
        )
