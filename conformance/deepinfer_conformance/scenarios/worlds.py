"""Checkpoints and prompts of the scenarios, and engines on them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from deepinfer.api import LLM, EngineConfig, RequestOutput, SamplingParams
from deepinfer.device.numerics import Numerics
from deepinfer_conformance.bench import Bench


class World(enum.Enum):
    """A checkpoint."""

    TRAINED = "trained"
    """The bundled one: real selections, real routing, wide margins."""
    RANDOM = "random"
    """The same shape with random weights: narrow margins, every expert in use."""


PROMPTS = (
    "Once upon a time there was a",
    "The capital of a country is",
    "def main(argv):\n    ",
    "To be, or not to be, that is the question: whether it is nobler to suffer in silence, or",
    "1 2 3 4",
    "Whenever a message comes in while the machine is busy, it has to wait until the machine has "
    "finished what it is doing, and only then it is taken from the queue, looked at, answered, "
    "written down in the log and forgotten. Whenever two messages come in at once,",
)
NUM_TOKENS = 20
BOUNDED_REPLAY = {"mode": "bounded", "keep_tokens": 32}
"""Replay section that cuts the longest prompt: as few kept tokens as the window allows."""


def world_config(world: World, numerics: Numerics, **changes: object) -> EngineConfig:
    """Configuration of a world; the backend section is not used."""
    fields: dict[str, object] = {"numerics": numerics.value, "max_model_len": 256, **changes}
    if world is World.RANDOM:
        fields["checkpoint"] = {"random_weights": True, "seed": 5}
    return EngineConfig.model_validate(fields)


def greedy(num_tokens: int = NUM_TOKENS, *, logprobs: int | None = None) -> SamplingParams:
    """Greedy decoding of exactly `num_tokens` tokens."""
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs
    )


def generate(
    bench: Bench,
    config: EngineConfig,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    prompts: Sequence[str] = PROMPTS,
    on_reference: bool = False,
) -> list[RequestOutput]:
    """Answer prompts on the backend under test, or on the reference."""
    numerics = Numerics(config.numerics)
    backend = bench.new_reference(numerics) if on_reference else bench.new_under_test(numerics)
    with LLM(config, backend=backend) as llm:
        return llm.generate(list(prompts), params)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of each answer.

    Raises:
        RuntimeError: an answer ended in an error.
    """
    for output in outputs:
        if output.error or not output.outputs:
            raise RuntimeError(f"request {output.request_id} failed: {output.error}")
    return [list(output.outputs[0].token_ids) for output in outputs]
