"""A file of batch requests whose answers end one by one, as those of people do.

Prompts are pieces of up to 79 characters of the held-out texts, each domain in turn; answers are
greedy and as long as drawn. With equal lengths all places of a batch come free at once, and nothing
is seen of what newcomers cost the others.

    python -m benchmarks.batch_file --requests 8000 --out requests.jsonl
    deepinfer batch run -i requests.jsonl -o results.jsonl --backend cuda_sm100 \\
        --set scheduler.max_num_seqs=256 --set scheduler.prefill_wait_steps=0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from benchmarks.engine_benchmark import positive
from deepinfer.evaluation.heldout import heldout_names, read_heldout

_SHORTEST_LINE = 25
_SHORTEST_PROMPT = 20
_PROMPT_LENGTHS = 60


def prompts() -> Iterator[str]:
    """Pieces of the held-out texts without end, a domain after the other."""
    texts = [
        [line for line in read_heldout(domain).split("\n") if len(line) >= _SHORTEST_LINE]
        for domain in heldout_names()
    ]
    for number in count():
        length = _SHORTEST_PROMPT + number * 7 % _PROMPT_LENGTHS
        for lines in texts:
            turn, place = divmod(number, len(lines))
            # Each turn through a text begins further into its lines.
            start = 5 * turn % (len(lines[place]) - _SHORTEST_PROMPT)
            yield lines[place][start : start + length].strip() or "Once"


def requests(num_requests: int, most_tokens: int, seed: int) -> Iterator[dict[str, object]]:
    """Requests for /v1/completions with answers of 1 to `most_tokens` tokens."""
    draw = random.Random(seed)
    for number, prompt in enumerate(islice(prompts(), num_requests)):
        body = {"prompt": prompt, "max_tokens": draw.randint(1, most_tokens), "temperature": 0}
        yield {
            "custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body,
        }  # fmt: skip


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--requests", type=positive, default=8000)
    parser.add_argument("--most-tokens", type=positive, default=127, help="of an answer")
    parser.add_argument("--seed", type=int, default=1, help="of the lengths")
    args = parser.parse_args()
    try:
        with args.out.open("w", encoding="utf-8") as out:
            for request in requests(args.requests, args.most_tokens, args.seed):
                out.write(json.dumps(request) + "\n")
    except OSError as error:
        parser.error(f"--out {args.out} cannot be written ({error}); name a file in a folder")
    print(f"{args.requests} requests in {args.out}")


if __name__ == "__main__":
    main()
