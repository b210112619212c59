"""Forward and backward of a step, call by call or captured as a CUDA graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor


class _Result(Protocol):
    @property
    def total(self) -> Tensor: ...


InputsT = TypeVar("InputsT", bound=tuple[Tensor, ...])
ResultT = TypeVar("ResultT", bound=_Result)


class EagerStep(Generic[InputsT, ResultT]):
    """Runs forward and backward call by call."""

    def __init__(self, loss: Callable[[InputsT], ResultT], parameters: Iterable[Tensor]) -> None:
        """Prepare.

        Args:
            loss: its `total` carries the gradient.
            parameters: that get one.
        """
        self._loss, self._parameters = loss, list(parameters)

    def run(self, inputs: InputsT) -> ResultT:
        """Leave the gradients in `.grad`."""
        result = self._loss(inputs)
        result.total.backward()
        return result

    def clear(self) -> None:
        """Drop the gradients after the optimizer has used them."""
        for value in self._parameters:
            value.grad = None


class CapturedStep(Generic[InputsT, ResultT]):
    """Replays forward and backward as one CUDA graph; inputs are copied into its own tensors.

    The model is small and issues thousands of kernels a step, so a plain run is bound by the CPU
    that launches them.
    """

    def __init__(
        self,
        loss: Callable[[InputsT], ResultT],
        example: InputsT,
        parameters: Iterable[Tensor],
    ) -> None:
        """Warm up on `example` and capture; needs a GPU.

        Args:
            loss: issues device work only.
            example: fixes all shapes.
            parameters: whose gradients are captured.
        """
        self._parameters = list(parameters)
        self._inputs: InputsT = type(example)(*(tensor.clone() for tensor in example))
        side = torch.cuda.Stream()  # noqa: TID251
        side.wait_stream(torch.cuda.current_stream())  # noqa: TID251
        with torch.cuda.stream(side):  # noqa: TID251
            for _ in range(3):
                loss(self._inputs).total.backward()
                self._drop_gradients()
        torch.cuda.current_stream().wait_stream(side)  # noqa: TID251
        self._graph = torch.cuda.CUDAGraph()  # noqa: TID251
        with torch.cuda.graph(self._graph):  # noqa: TID251
            self._result = loss(self._inputs)
            self._result.total.backward()
        self._gradients = [value.grad for value in self._parameters]

    def run(self, inputs: InputsT) -> ResultT:
        """Leave the gradients in `.grad`; the result is overwritten by the next run."""
        # Another graph may have been captured or run since: each writes its own gradients.
        for value, gradient in zip(self._parameters, self._gradients, strict=True):
            value.grad = gradient
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._result

    def clear(self) -> None:
        """Nothing to do: a replay writes all gradients anew."""

    def _drop_gradients(self) -> None:
        for value in self._parameters:
            value.grad = None


class StepMaker:
    """Captures steps where that is wanted and works.

    Attributes:
        error: why a capture failed; none is tried after it.
    """

    def __init__(self, *, captures: bool) -> None:
        self._captures = captures
        self.error: str | None = None

    def make(
        self,
        loss: Callable[[InputsT], ResultT],
        example: InputsT,
        parameters: Iterable[Tensor],
    ) -> EagerStep[InputsT, ResultT] | CapturedStep[InputsT, ResultT]:
        """A step for inputs of the shapes of `example`.

        A step that cannot be captured goes on slower, and says so.
        """
        parameters = list(parameters)
        for value in parameters:
            value.grad = None
        if self._captures and self.error is None:
            try:
                return CapturedStep(loss, example, parameters)
            except RuntimeError as error:
                self.error = str(error)
                sys.stderr.write(f"capture failed, steps run one call at a time: {error}\n")
                for value in parameters:
                    value.grad = None
        return EagerStep(loss, parameters)
