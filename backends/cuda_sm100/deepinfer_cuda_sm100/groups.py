"""The process group of one rank; ranks come with expert parallelism."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.errors import ContractError


class OneRank:
    """A group whose only member is this process."""

    rank = 0
    size = 1

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """`values` itself."""
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """[1, ...] view of `values`."""
        return values.unsqueeze(0)

    def all_to_all(self, values: Tensor) -> Tensor:
        """`values` [1, ...] itself.

        Raises:
            ContractError: the leading dimension is not the number of ranks.
        """
        if values.dim() == 0 or values.shape[0] != self.size:
            raise ContractError(
                f"all_to_all: values have shape {list(values.shape)}, expected [1, ...] with one "
                "entry for each rank of the group"
            )
        return values

    def barrier(self) -> None:
        """Return at once."""
