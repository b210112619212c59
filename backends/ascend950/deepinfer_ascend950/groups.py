"""The process group of one rank."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.errors import ContractError


class SingleGroup:
    """A group whose only member is this process; collectives move nothing."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        return values.unsqueeze(0)

    def all_to_all(self, values: Tensor) -> Tensor:
        """`values` [1, ...] itself.

        Raises:
            ContractError: the leading dimension is not 1.
        """
        if values.dim() == 0 or values.shape[0] != 1:
            raise ContractError(
                f"all_to_all: values have shape {list(values.shape)}, expected [1, ...] with one "
                "entry for the only rank of the group"
            )
        return values

    def barrier(self) -> None:
        return
