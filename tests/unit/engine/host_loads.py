"""An engine on the null device with a prompt that only host memory knows."""

from __future__ import annotations

from deepinfer.engine.sampling_params import SamplingParams
from tests.unit.engine.conftest import NullEngine, null_engine

KNOWN = [50] * 30
NUM_COPIES = 8  # seven blocks, and the windows after them


def params(max_tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def with_a_prompt_in_host_memory(depth: int, copy_us: float) -> NullEngine:
    """The device knows nothing of `KNOWN` any more; its copies take `copy_us` each."""
    null = null_engine(
        overrides={
            "scheduler.async_depth": depth,
            "cache.num_blocks": 20,
            "cache.prefix": True,
            "cache.host_memory": 1_000_000,
        }
    )
    for index, prompt in enumerate((KNOWN, [51] * 79)):
        null.engine.add_request(f"before{index}", prompt, params(1))
        null.run()
    null.runner.copies.copy_us = copy_us
    return null


def start_load(null: NullEngine) -> None:
    """Ask for more than `KNOWN`, while another request runs."""
    null.engine.add_request("other", [52, 53], params(20))
    null.engine.step()
    null.engine.add_request("known", [*KNOWN, 9], params(4))
    null.engine.step()
    assert null.engine.stats().num_loaded_blocks == NUM_COPIES - 1


def disturb_a_load(depth: int, end: str) -> None:
    """Take the memory from a sequence whose load is on the way, and give it to others."""
    null = with_a_prompt_in_host_memory(depth, copy_us=1000.0)
    start_load(null)
    if end == "abort":
        null.engine.abort("known")
    else:
        (sequence,) = (s for s in null.engine._scheduler.running if s.loads)
        null.engine._scheduler.preempt(sequence)
    for index in range(3):
        null.engine.add_request(f"after{index}", [54 + index] * 20, params(12))
    for result in null.run().values():
        for answer in result.outputs:
            assert answer.token_ids == list(range(20, 20 + len(answer.token_ids)))
    null.engine.close()
