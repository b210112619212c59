"""Measure a run's master as it will be released: tasks, bits per byte, expert loads.

    python -m deepinfer_training.evaluate --data DATA --config CONFIG --run RUN

Writes RUN/evaluation.json after every part, so that a run out of time keeps what it has, and
RUN/expert_load.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from deepinfer.device.errors import DeepInferError
from deepinfer_training import fake_quant
from deepinfer_training.architecture import Architecture
from deepinfer_training.evaluation import (
    Model,
    bits_per_byte,
    expert_loads,
    task_scores,
)
from deepinfer_training.parameters import Part, load_master
from deepinfer_training.run_log import RunLog
from deepinfer_training.sampler import continue_prompts
from deepinfer_training.sequence_plan import Planner
from deepinfer_training.sequences import SequenceSource, Split
from deepinfer_training.tasks import Tasks, dump, load_heldout
from deepinfer_training.train import master_files, pick_device, read_token_map
from deepinfer_training.weights import rounded_parameters

_SAMPLES = {
    "tale": "Once upon a time there was a kind farmer named Clara.",
    "prose": "It was a fine morning when Mr. Darcy",
    "code": 'def read_file(path, mode="r"):\n    """Return the contents of the file."""\n',
    "speech": "My fellow citizens, the state of the Union",
}


def main() -> int:
    """Evaluate from the command line; 0 on success, 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data")
    parser.add_argument("--config", type=Path, required=True, help="flat config.json")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--count", type=int, default=64, help="items of a task")
    parser.add_argument("--max-tokens", type=int, help="cut held-out texts, for a smoke run")
    parser.add_argument("--batch", type=int, default=16, help="sequences at a time")
    parser.add_argument("--device", help="default: cuda if present, else cpu")
    args = parser.parse_args()
    device = pick_device(args.device)
    try:
        arch = Architecture.from_json(args.config)
        source = SequenceSource(args.data, arch.pad_token_id)
        master = load_master(arch, Part.BACKBONE, master_files(args.run), device)
    except DeepInferError as error:
        sys.stderr.write(f"evaluation cannot start: {error}\n")
        return 2
    planner = Planner(arch, read_token_map(args.data), device)
    tasks = Tasks(source.generators, args.data / "heldout", Split.CONFORMANCE, seed=1)
    texts = load_heldout(args.data / "heldout")
    rounded = rounded_parameters(master)
    log = RunLog(args.run / "evaluation_log.json", {})
    results: dict[str, Any] = {"items_per_task": args.count}
    for name, numerics in (("normative", fake_quant.NORMATIVE), ("exact", fake_quant.EXACT)):
        model = Model(rounded, arch, planner, numerics, device)
        part: dict[str, Any] = {}
        results[name] = part
        started = time.monotonic()
        part["bits_per_byte"] = {
            file: round(
                bits_per_byte(model, source.generators.text, content, batch=args.batch,
                              max_tokens=args.max_tokens), 4)
            for file, content in texts.items()
        }  # fmt: skip
        log.line(f"{name} bits per byte {part['bits_per_byte']}")
        part["tasks"] = task_scores(
            model, tasks, count=args.count, controls=name == "normative", batch=args.batch
        )
        log.line(f"{name} tasks {part['tasks']} ({time.monotonic() - started:.1f} s)")
        dump(results, args.run / "evaluation.json")
    model = Model(rounded, arch, planner, fake_quant.NORMATIVE, device)
    loads = expert_loads(model, source, count=min(8, args.count), length=1024)
    dump({"share_of_routed_tokens": loads}, args.run / "expert_load.json")
    results["samples"] = samples(model, source)
    for name, text in results["samples"].items():
        log.line(f"sample {name}: {text!r}")
    dump(results, args.run / "evaluation.json")
    return 0


def samples(model: Model, source: SequenceSource, count: int = 64) -> dict[str, str]:
    """Greedy continuations of a few openings."""
    text = source.generators.text
    result = {}
    generator = torch.Generator(model.device).manual_seed(3)
    for name, opening in _SAMPLES.items():
        ids = [text.bos, *text.encode(opening)]
        continued = continue_prompts(model, torch.tensor([ids]), count, torch.zeros(1), generator)[
            0
        ].tolist()
        result[name] = text.decode(continued)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
