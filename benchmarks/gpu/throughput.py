"""Decode tokens per second of the bundled checkpoint, by batch, with and without graphs."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from deepinfer import SamplingParams
from deepinfer.config import EngineConfig, override
from deepinfer.engine.llm_engine import LLMEngine

BATCHES = (1, 16, 64, 256)
CONTEXT = 64
WARM_STEPS, STEPS = 5, 40


def tokens_per_second(config: EngineConfig, batch: int) -> float:
    """Median over decode steps of `batch` sequences, host work included."""
    engine = LLMEngine.from_config(config)
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, detokenize=False)
    for index in range(batch):
        prompt = [(7 * index + 13 * position) % 4000 + 10 for position in range(CONTEXT)]
        engine.add_request(f"r{index}", prompt, params)
    while engine.stats().generated_tokens < batch:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    engine.close()
    return batch / statistics.median(times)


def main() -> int:
    """Measure and write the table; rewritten after each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for batch in BATCHES:
        for graphs in (True, False):
            config = override(
                EngineConfig(),
                {
                    "backend.name": arguments.backend,
                    "backend.options": {"graphs": graphs},
                    "max_model_len": 512,
                    "scheduler.max_num_seqs": max(batch, 1),
                    "scheduler.max_num_tokens": 4096,
                },
            )
            figures[f"{batch},{'graphs' if graphs else 'launches'}"] = tokens_per_second(
                config, batch
            )
            lines = ["| batch | tokens/s with graphs | without |", "|---|---|---|"]
            for size in BATCHES:
                columns = [figures.get(f"{size},{kind}") for kind in ("graphs", "launches")]
                lines.append(
                    f"| {size} | "
                    + " | ".join("-" if x is None else f"{x:,.0f}" for x in columns)
                    + " |"
                )
            result = {"table": "\n".join(lines), "tokens_per_s": figures}
            arguments.out.write_text(json.dumps(result, indent=1))
            print(batch, graphs, figures, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
