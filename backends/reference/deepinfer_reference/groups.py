"""The process group of one rank."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.errors import ContractError


class SingleGroup:
    """A group whose only member is this process; collectives move nothing."""

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def size(self) -> int:
        """1."""
        return 1

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """`values` itself."""
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """[1, ...] view of `values`."""
        return values.unsqueeze(0)

    def all_to_all(self, values: Tensor) -> Tensor:
        """`values` itself.

        Args:
            values: [1, ...] the entry for rank 0.
        Raises:
            ContractError: the leading dimension is not the number of ranks.
        """
        if values.dim() == 0 or values.shape[0] != self.size:
            raise ContractError(
                f"all_to_all: values have shape {list(values.shape)}, expected [{self.size}, ...] "
                "with one entry for each rank of the group"
            )
        return values

    def barrier(self) -> None:
        """Return at once."""
