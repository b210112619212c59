"""Everything the owner of an Ascend 950 can tell us, in one command and one report.

    python benchmarks/ascend950_report.py --out report950              # on the NPU
    python benchmarks/ascend950_report.py --out report950 --emulated   # on a CPU, without an NPU

It probes, compares every op case with the reference, repeats the golden tokens in exact fp32,
generates beside the reference in normative numerics, and times prefill and decode. A part that
fails is written down and the next one runs. The folder gets `report.md` and `report.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepinfer.api import LLM
from deepinfer.cli.report import write_json
from deepinfer.config import EngineConfig, override
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import list_backends, load_backend
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer_conformance.cases import op_cases
from deepinfer_conformance.run import run_case

BACKEND = "ascend950"
GOLDEN = Path(__file__).parents[1] / "tests/data/golden"
PROMPTS = ("The rain had stopped and", "Once upon a time there was a", "1, 2, 3, 5, 8,")
BATCHES = (1, 4, 16)
CONTEXT, NUM_TOKENS = 64, 32
# What the documentation leaves open, in the order of backends/ascend950/README.md, and the ops
# whose cases show it.
CHECKS = {
    "1. amax floor of npu_dynamic_mx_quant": ("quant/quantize_a8:",),
    "2. scale layout and strides of npu_quant_matmul": ("quant/linear:",),
    "3. nibble order and scale layout of E2M1 experts": ("moe/moe_experts:",),
    "4. direction of npu_mhc_post": ("mhc/mhc_expand:",),
    "5. npu_mhc_pre and npu_mhc_sinkhorn as documented": ("mhc/mhc_mix:",),
    "6. HF32 is off in fp32 products": ("quant/linear_f32:", "quant/grouped_linear:"),
    "7. npu_rms_norm at eps 1e-20": ("norm/rmsnorm:",),
    "8. rows behind the last group, index by columns": ("moe/moe_dispatch:", "moe/moe_combine:"),
    "9. int8 rows written by npu_scatter_nd_update_": ("kv/rope_store:", "kv/copy_rows:"),
    "10. e4m3 bytes decoded by torch on the device": ("attention/sparse_attention:",),
    "11. int64 products, shifts and remainders": ("sampling/philox_uniform:", "engram/ngram_hash:"),
    "12. stable sort and searchsorted": ("moe/moe_gate:", "indexer/", "state/"),
}


class Progress:
    """One line on standard error for each thing that begins."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def say(self, words: str) -> None:
        print(f"[{time.perf_counter() - self._start:7.1f} s] {words}", file=sys.stderr, flush=True)


def attempt(part: Callable[[], Any]) -> Any:  # noqa: ANN401
    """What a part of the report finds, or the error that ended it."""
    try:
        return part()
    except Exception as error:
        # A device can fail in any way; the report has to say how, and go on.
        return {"error": f"{type(error).__name__}: {error}"}


def probe(options: Mapping[str, object]) -> dict[str, Any]:
    """What is here."""
    (info,) = [i for i in list_backends({BACKEND: options}) if i.name == BACKEND]
    device = info.probe.device if info.probe else ""
    versions = dict(info.probe.versions) if info.probe else {}
    return {"device": device, "versions": versions, "missing": list(info.reasons)}


def ops(options: Mapping[str, object], progress: Progress) -> list[dict[str, Any]]:
    """One row for each op and numerics mode: cases, failures, worst error over its bound."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for numerics in Numerics:
        backend = load_backend(BackendConfig(BACKEND, numerics, options))
        reference = load_backend(BackendConfig("reference", numerics, {"runtime": "inline"}))
        for case in op_cases():
            if case.numerics is not numerics:
                continue
            name = f"{case.spec.family}/{case.spec.name}"
            if (name, numerics.value) not in rows:
                progress.say(f"{numerics.value} {name}")
            row = rows.setdefault(
                (name, numerics.value),
                {"op": name, "numerics": numerics.value, "cases": 0, "worst": 0.0, "failures": []},
            )
            row["cases"] += 1
            result = attempt(lambda case=case, b=backend, r=reference: run_case(b, case, r))
            if isinstance(result, dict):
                row["failures"].append(f"{case.case_id}: {result['error']}")
                continue
            if not result.passed:
                row["failures"].append(result.explain())
            shares = [v.error / v.bound for v in result.verdicts.values() if v.bound > 0]
            row["worst"] = max([row["worst"], *(share for share in shares if share < 1e300)])
        backend.close()
        reference.close()
    return list(rows.values())


def _engine(options: Mapping[str, object] | None, changes: Mapping[str, object]) -> LLM:
    name = "reference" if options is None else BACKEND
    chosen = {"runtime": "inline"} if options is None else dict(options)
    base = {"backend.name": name, "backend.options": chosen}
    return LLM(override(EngineConfig(), {**base, **changes}))


def golden(options: Mapping[str, object], progress: Progress) -> dict[str, Any]:
    """Greedy tokens of the golden fixtures in exact fp32: how many cases differ, of how many."""
    found: dict[str, Any] = {}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for fixture in ("tiny_a", "tiny_b"):
        progress.say(f"golden {fixture}")
        cases = json.loads((GOLDEN / fixture / "cases.json").read_text(encoding="utf-8"))["cases"]
        changes = {
            "checkpoint.path": str(GOLDEN / fixture / "checkpoint"),
            "numerics": "exact",
            "max_model_len": 256,
        }
        with _engine(options, changes) as llm:
            results = llm.generate([case["prompt_ids"] for case in cases], params)
        differing = [
            case["name"]
            for result, case in zip(results, cases, strict=True)
            if result.outputs[0].token_ids != case["greedy_ids"]
        ]
        found[fixture] = {"cases": len(cases), "differing": differing}
    return found


def generation(options: Mapping[str, object], progress: Progress) -> list[dict[str, Any]]:
    """Greedy normative answers beside the reference's: tokens until they part."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = []
    for chosen in (None, options):
        progress.say(f"generation on {'reference' if chosen is None else BACKEND}")
        with _engine(chosen, {"max_model_len": 256}) as llm:
            answers.append([r.outputs[0] for r in llm.generate(list(PROMPTS), params)])
    rows = []
    for prompt, expected, found in zip(PROMPTS, *answers, strict=True):
        pairs = zip(expected.token_ids, found.token_ids, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), NUM_TOKENS)
        rows.append({"prompt": prompt, "equal_tokens": same, "text": found.text})
    return rows


def speed(options: Mapping[str, object], progress: Progress) -> list[dict[str, Any]]:
    """Tokens per second of prefill and decode on the bundled checkpoint, by batch."""
    rows = []
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with _engine(options, {"max_model_len": 256, "scheduler.max_num_seqs": max(BATCHES)}) as llm:
        for batch in BATCHES:
            progress.say(f"speed at batch {batch}")
            prompts = [[(7 * i + 13 * p) % 4000 + 10 for p in range(CONTEXT)] for i in range(batch)]
            llm.generate(prompts, first)  # warm up
            start = time.perf_counter()
            llm.generate(prompts, first)
            prefill_s = time.perf_counter() - start
            start = time.perf_counter()
            llm.generate(prompts, params)
            decode_s = time.perf_counter() - start - prefill_s
            rows.append(
                {
                    "batch": batch,
                    "prefill_tokens_per_s": batch * CONTEXT / prefill_s,
                    "decode_tokens_per_s": batch * (NUM_TOKENS - 1) / max(decode_s, 1e-9),
                }
            )
    return rows


def checks(rows: Any, *, emulated: bool) -> dict[str, str]:  # noqa: ANN401
    """Whether the ops that show each open point pass; the emulation settles none of them."""
    if isinstance(rows, dict):
        return dict.fromkeys(CHECKS, "not reached")
    right = "open: the emulation follows the documentation" if emulated else "passes"
    found = {}
    for check, ops_shown in CHECKS.items():
        shown = [r for r in rows if any(f"{r['op']}:".startswith(name) for name in ops_shown)]
        failed = sorted({r["op"] for r in shown if r["failures"]})
        found[check] = right if not failed else f"FAILS in {', '.join(failed)}"
    return found


def markdown(figures: Mapping[str, Any], title: str) -> str:
    """The report to read."""
    lines = [f"# {title}", "", "## Probe", ""]
    lines += [f"- device: {figures['probe']['device'] or 'none'}"]
    lines += [f"- {name} {version}" for name, version in figures["probe"]["versions"].items()]
    lines += ["", "## Check these first", "", "| point | result |", "|---|---|"]
    lines += [f"| {point} | {result} |" for point, result in figures["checks"].items()]
    lines += ["", "## Ops", ""]
    if isinstance(figures["ops"], dict):
        lines += [figures["ops"]["error"]]
    else:
        lines += [
            "| op | numerics | cases | failed | worst error / bound |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['op']} | {r['numerics']} | {r['cases']} | {len(r['failures'])} | "
            f"{r['worst']:.2g} |"
            for r in figures["ops"]
        ]
        failures = [failure for row in figures["ops"] for failure in row["failures"]]
        lines += ["", *(f"- {failure}" for failure in failures)]
    for part in ("golden", "generation", "speed"):
        lines += ["", f"## {part.capitalize()}", "", "```"]
        lines += [json.dumps(figures[part], ensure_ascii=False, indent=1), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the report; 0 when every part passes, 1 when one fails, 2 without a device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--emulated", action="store_true", help="run on the CPU's emulation")
    args = parser.parse_args()
    options: dict[str, object] = {"emulated": True} if args.emulated else {}
    progress = Progress()
    found: dict[str, Any] = {"emulated": args.emulated, "probe": probe(options)}
    if found["probe"]["missing"]:
        for reason in found["probe"]["missing"]:
            print(f"missing: {reason}", file=sys.stderr)
        print("nothing was run; --emulated runs on a CPU instead", file=sys.stderr)
        return 2
    found["ops"] = attempt(lambda: ops(options, progress))
    found["checks"] = checks(found["ops"], emulated=args.emulated)
    found["golden"] = attempt(lambda: golden(options, progress))
    found["generation"] = attempt(lambda: generation(options, progress))
    found["speed"] = attempt(lambda: speed(options, progress))
    title = "Ascend 950 report" + (
        ": EMULATED on a CPU, nothing ran on an NPU" if args.emulated else ""
    )
    args.out.mkdir(parents=True, exist_ok=True)
    text = markdown(found, title)
    (args.out / "report.md").write_text(text, encoding="utf-8")
    write_json(args.out / "report.json", "ascend950_report", found)
    print(text)
    progress.say(f"written to {args.out}")
    return 1 if has_failed(found) else 0


def has_failed(found: Mapping[str, Any]) -> bool:
    """Whether a part crashed, an op case failed or a golden answer differs."""
    parts = [found[name] for name in ("ops", "golden", "generation", "speed")]
    if any(isinstance(part, dict) and "error" in part for part in parts):
        return True
    wrong_ops = any(row["failures"] for row in found["ops"])
    return wrong_ops or any(fixture["differing"] for fixture in found["golden"].values())


if __name__ == "__main__":
    raise SystemExit(main())
