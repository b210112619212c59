"""Greedy answers with real drafters equal those without speculation, however steps are cut.

The trained checkpoint, golden weights, and random weights with blocks of 8 drafts: the first one
accepts much, the others next to nothing, and both have to give the target's own tokens.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator

import pytest

from deepinfer.engine import round_costs
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.speculation.cost_tables import CostTables
from tests.backend.engine.conftest import GOLDEN, collect, engine_config

Prompt = str | list[int]
Run = Callable[..., tuple[list[RequestOutput], LLMEngine]]
TALES: list[Prompt] = [
    "Once upon a time there was a kind farmer named Clara.",
    "\nThe code of Alice Stone is 4821.\n\nThe code of Henry is 3097.\n\n"
    "Question: What is the code of Alice Stone?\nAnswer:",
    "Long ago, in a village, there lived a curious clock maker called Mira. One day",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13",
]
NUMBERS: list[Prompt] = [
    [(17 * i + 7 * j + i * j) % 300 + 5 for j in range(1 + 7 * i)] for i in range(4)
]
BLOCK_OF_8 = "blocks of 8"
# A row costs so much that budgets are small and change.
STEEP = CostTables({1: 10.0, 64: 20.0}, {1: 100.0, 8: 400.0, 384: 20_000.0})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Overrides that choose each checkpoint."""
    folder = tmp_path_factory.mktemp("block-of-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tiny_a/checkpoint" / name, folder)
    config = json.loads((GOLDEN / "tiny_a/checkpoint/config.json").read_text())
    assert config["text_config"]["dspark_block_size"] == 5
    config["text_config"] |= {"dspark_block_size": 8, "sliding_window": 12}
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "trained": {"checkpoint.path": None, "numerics": "normative"},
        "golden": {},
        BLOCK_OF_8: {"checkpoint.path": str(folder), "checkpoint.random_weights": True},
    }


@pytest.fixture(scope="module")
def run(folders: dict[str, dict[str, object]]) -> Iterator[Run]:
    """Answers of a checkpoint under some overrides; without speculation only once."""
    engines: dict[str, LLMEngine] = {}

    def answers(
        checkpoint: str,
        overrides: dict[str, object] | None = None,
        *,
        prompts: list[Prompt] | None = None,
        max_tokens: int = 24,
        temperature: float = 0.0,
    ) -> tuple[list[RequestOutput], LLMEngine]:
        if prompts is None:
            prompts = TALES if checkpoint == "trained" else NUMBERS
        key = f"{checkpoint} {overrides}"
        if key not in engines:
            chosen = folders[checkpoint] | (overrides or {})
            engines[key] = LLMEngine.from_config(engine_config(chosen))
        engine = engines[key]
        for index, prompt in enumerate(prompts):
            seed = sum(map(ord, str(prompt)))
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=max_tokens, logprobs=2
            )
            engine.add_request(f"r{index}", prompt, params)
        results = collect(engine)
        return [results[f"r{index}"][-1] for index in range(len(prompts))], engine

    yield answers
    for engine in engines.values():
        engine.close()


@pytest.fixture(autouse=True)
def steep_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets do not depend on how fast this machine happens to be."""
    monkeypatch.setattr(round_costs, "round_costs", lambda *args, **kwargs: STEEP)


def check_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """P30: log probabilities, too."""
    for left, right in zip(found, expected, strict=True):
        (one,), (other,) = left.outputs, right.outputs
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert any(entry.logprob < 0.0 for entry in one.logprobs)
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert entry.rank == wanted.rank


def fixed(max_drafts: int | None, depth: int = 1) -> dict[str, object]:
    return {
        "speculation.mode": "fixed",
        "speculation.max_drafts": max_drafts,
        "scheduler.async_depth": depth,
    }


ADVERSARIAL = {"backend.options": {"runtime": "adversarial"}}
VARIANTS: dict[str, dict[str, object]] = {
    "1 draft": fixed(1),
    "2 drafts, depth 0": fixed(2, 0),
    "3 drafts, depth 2, adversarial": fixed(3, 2) | ADVERSARIAL,
    "4 drafts, chunks of 7": fixed(4) | {"scheduler.prefill_chunk_tokens": 7},
    "5 drafts": fixed(5),
    "5 drafts, prefix cache, twice": fixed(5) | {"cache.prefix": True},
    "5 drafts, few rows": fixed(5) | {"scheduler.max_num_seqs": 3, "scheduler.max_num_tokens": 7},
    "dynamic": fixed(None) | {"speculation.mode": "dynamic"},
    "dynamic, depth 0": fixed(None, 0) | {"speculation.mode": "dynamic"},
    "dynamic, depth 2, adversarial": fixed(4, 2) | ADVERSARIAL | {"speculation.mode": "dynamic"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("checkpoint", ["trained", "golden"])
def test_answers_are_those_without_speculation(checkpoint: str, variant: str, run: Run) -> None:
    expected, _ = run(checkpoint)
    times = 2 if "twice" in variant else 1
    for _ in range(times):
        found, engine = run(checkpoint, VARIANTS[variant])
        check_equal(found, expected)
    assert engine.speculation is not None
    if checkpoint == "trained":
        assert engine.speculation.places.accepted.sum() > 10


@pytest.mark.parametrize("max_drafts", [6, 7, 8])
def test_blocks_of_8_drafts(max_drafts: int, run: Run) -> None:
    """P64, with blocks as long as they may be."""
    expected, _ = run(BLOCK_OF_8)
    found, engine = run(BLOCK_OF_8, fixed(max_drafts, max_drafts % 3))
    check_equal(found, expected)
    assert engine.speculation is not None
    assert len(engine.speculation.places.drafted) == max_drafts


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_with_a_real_drafter(depth: int, run: Run) -> None:
    expected, _ = run("trained")
    scarce = {"cache.block_size": 16, "cache.num_blocks": 9}
    found, engine = run("trained", fixed(5, depth) | scarce)
    check_equal(found, expected)
    assert engine.stats().num_preemptions >= 1


@pytest.mark.parametrize("depth", [0, 1])
def test_the_end_of_the_longest_sequence(depth: int, run: Run) -> None:
    """P37."""
    limit = {"max_model_len": 60}
    plain, _ = run("trained", limit, max_tokens=100)
    found, _ = run("trained", limit | fixed(5, depth), max_tokens=100)
    check_equal(found, plain)
    for result in found:
        assert len(result.prompt_token_ids) + len(result.outputs[0].token_ids) <= 60


def test_seeded_answers_depend_on_neither_company_nor_steps(run: Run) -> None:
    """With a fixed number of drafts; they are drawn and judged by the request's own numbers."""
    together, engine = run("trained", fixed(3), temperature=0.7)
    assert engine.speculation is not None
    assert engine.speculation.places.accepted.all()
    variants = [fixed(3, 0), fixed(3, 2) | ADVERSARIAL | {"scheduler.prefill_chunk_tokens": 7}]
    for overrides in variants:
        check_equal(run("trained", overrides, temperature=0.7)[0], together)
    alone, _ = run("trained", fixed(3), prompts=TALES[2:3], temperature=0.7)
    check_equal(alone, together[2:3])


@pytest.mark.parametrize(
    ("depth", "variant"), [(0, {}), (1, {}), (1, {"cache.prefix": True}), (2, ADVERSARIAL)]
)
def test_preemption_changes_no_seeded_answer(
    depth: int, variant: dict[str, object], run: Run
) -> None:
    """The round goes on after the newest token, with the same drafts."""
    # Otherwise fewer drafts are verified before somebody is preempted.
    scarce = {"cache.block_size": 16, "cache.num_blocks": 9, "determinism": "deterministic"}
    chosen = fixed(5, depth) | scarce | variant
    expected, _ = run("trained", fixed(5), max_tokens=36, temperature=0.7)
    found, engine = run("trained", chosen, max_tokens=36, temperature=0.7)
    assert engine.stats().num_preemptions >= 1
    check_equal(found, expected)


def copied_identifiers(count: int) -> list[Prompt]:
    """Long names that the answer has to repeat letter by letter."""
    names = [f"node_{index * 7919 % 10007:05d}_{index * 31 % 97:02d}" for index in range(count)]
    return [f"\nThe code of {name} is {name[::-1]}.\n\nThe code of {name} is" for name in names]


def test_copied_identifiers(run: Run) -> None:
    """P54."""
    prompts = copied_identifiers(4)
    expected, _ = run("trained", prompts=prompts)
    for max_drafts in (2, 5):
        check_equal(run("trained", fixed(max_drafts), prompts=prompts)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("max_drafts", range(1, 6))
def test_64_prompts_of_copied_identifiers(max_drafts: int, run: Run) -> None:
    """P54."""
    prompts = copied_identifiers(64)
    expected, _ = run("trained", prompts=prompts, max_tokens=48)
    found, _ = run("trained", fixed(max_drafts), prompts=prompts, max_tokens=48)
    check_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["trained", "golden", BLOCK_OF_8])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_everything_with_everything(checkpoint: str, depth: int, run: Run) -> None:
    expected, _ = run(checkpoint, max_tokens=48)
    most = 8 if checkpoint == BLOCK_OF_8 else 5
    chunks = [{}, {"scheduler.prefill_chunk_tokens": 1}, {"scheduler.prefill_chunk_tokens": 7}]
    runtimes = [{}, ADVERSARIAL]
    for mode, max_drafts, chunk, runtime in itertools.product(
        ("fixed", "dynamic"), range(1, most + 1), chunks, runtimes
    ):
        overrides = fixed(max_drafts, depth) | chunk | runtime | {"speculation.mode": mode}
        check_equal(run(checkpoint, overrides, max_tokens=48)[0], expected)
