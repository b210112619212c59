"""The drafter on the golden fixtures: their drafts, and the same bits however rows arrive.

With `--backend` on that backend alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import ConfigError
from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import sampling
from deepinfer.device.ops.sampling import Purpose, SampleParams, SampleWork
from deepinfer.device.registry import load_backend
from deepinfer.device.runtime import StepKind, run_on
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.draft_batch import DraftBatch, Drafts
from deepinfer.model.drafter import Drafter
from deepinfer.model.loading import LoadedModel, load_model
from deepinfer.model.replay import ALL_ROWS, PrefillRows, batch_replay, exact_rows
from deepinfer.model.step_batch import StepBatch
from deepinfer.model.trace_run import trace_tokens
from deepinfer.model.weights.reader import CheckpointReader

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
# The fixtures allow 1e-3 of the logit scale; other summation orders give about 1e-5.
BOUND = 1e-4
BLOCK_SIZE = 8


class Draft(NamedTuple):
    """One draft of a fixture: what the target has run, the anchor, the expected values."""

    name: str
    context: list[int]
    anchor: int
    expected: dict[str, Any]


class Model(NamedTuple):
    folder: Path
    loaded: LoadedModel
    drafter: Drafter
    backend: Backend
    drafts: list[Draft]


def _load(name: str, config: BackendConfig) -> Model:
    folder = GOLDEN / name
    backend = load_backend(config)
    loaded = load_model(folder / "checkpoint", backend, max_positions=512, with_drafter=True)
    assert loaded.drafter is not None
    cases = json.loads((folder / "cases.json").read_text())["cases"]
    drafts = [
        Draft(
            f"{case['name']}.draft{draft['after_generated']}",
            case["prompt_ids"] + case["greedy_ids"][: draft["after_generated"]],
            draft["anchor"],
            draft,
        )
        for case in cases
        for draft in case["drafts"]
    ]
    return Model(folder, loaded, loaded.drafter, backend, drafts)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster without helpers, and helpers that wait for a core are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def backend_name(request: pytest.FixtureRequest) -> str:
    """A backend whose bits do not depend on how rows are batched."""
    return request.config.getoption("--backend") or "reference"


@pytest.fixture(scope="module", params=["tiny_a", "tiny_b"])
def exact(request: pytest.FixtureRequest, backend_name: str) -> Iterator[Model]:
    model = _load(request.param, BackendConfig(backend_name, Numerics.EXACT))
    yield model
    model.backend.close()


@pytest.fixture(scope="module", params=["tiny_a", "tiny_b"])
def emulated(request: pytest.FixtureRequest) -> Iterator[Model]:
    """ascend950 on a CPU: exact fp32, but its bits may depend on how rows are batched."""
    if request.config.getoption("--backend"):
        pytest.skip("--backend names another backend")
    config = BackendConfig("ascend950", Numerics.EXACT, {"emulated": True})
    model = _load(request.param, config)
    yield model
    model.backend.close()


@pytest.fixture(scope="module", params=list(Numerics), ids=lambda mode: mode.value)
def model(request: pytest.FixtureRequest, backend_name: str) -> Iterator[Model]:
    model = _load("tiny_a", BackendConfig(backend_name, request.param))
    yield model
    model.backend.close()


def check_draft(model: Model, draft: Draft, found: dict[str, Tensor]) -> None:
    """Everything the fixture says about one block."""
    golden = load_file(model.folder / "cases.safetensors")
    scale = json.loads((model.folder / "cases.json").read_text())["logit_scale"]
    assert found["tokens"].flatten().tolist() == draft.expected["tokens"], draft.name
    logits = golden[f"{draft.name}.logits"]
    assert (found["logits"] - logits).abs().max() <= BOUND * scale, draft.name
    confidence_logits = torch.tensor(draft.expected["confidence_logit"])
    assert torch.allclose(
        found["confidence_logits"].flatten(), confidence_logits, rtol=0.0, atol=1e-3
    )
    if "hidden" in found:
        hidden = golden[f"{draft.name}.head_hidden"]
        assert (found["hidden"] - hidden).abs().max() <= 1e-3 * hidden.abs().max(), draft.name
        for stage, experts in enumerate(draft.expected["expert_ids"]):
            assert found[f"{stage}.expert_ids"].tolist() == experts, draft.name


@pytest.mark.parametrize(
    ("chunk", "kind"), [(None, StepKind.PREFILL), (7, StepKind.PREFILL), (None, StepKind.DECODE)]
)
def test_trace_gives_the_golden_drafts_in_any_chunks(
    exact: Model, chunk: int | None, kind: StepKind
) -> None:
    # Decoding is slow, and every second context is the one before it with 7 tokens more.
    for draft in exact.drafts[:: 2 if kind is StepKind.DECODE else 1]:
        trace = trace_tokens(
            exact.loaded, exact.backend, [*draft.context, draft.anchor], kind=kind, chunk=chunk
        )
        found = {
            name.removeprefix("draft."): value
            for name, value in trace.items()
            if name.startswith("draft.")
        }
        check_draft(exact, draft, found)


def test_chunking_and_decoding_change_no_bit_of_a_draft(model: Model) -> None:
    draft = model.drafts[-1]
    ids = [*draft.context, draft.anchor]
    whole = trace_tokens(model.loaded, model.backend, ids)
    others = [trace_tokens(model.loaded, model.backend, ids, chunk=chunk) for chunk in (64, 7)]
    others.append(trace_tokens(model.loaded, model.backend, ids, kind=StepKind.DECODE))
    names = [name for name in whole if name.startswith("draft.")]
    assert len(names) == 5 + 3 * model.loaded.config.num_nextn_predict_layers
    for other in others:
        assert [name for name in names if not torch.equal(whole[name], other[name])] == []


class Company:
    """Requests of one batch, the last of them padding; slots and blocks in an odd order."""

    def __init__(self, model: Model, num_requests: int, longest: int, max_drafts: int = 0) -> None:
        self.model = model
        self.num_requests = num_requests + 1
        width = -(-longest // BLOCK_SIZE)
        num_blocks = self.num_requests * width
        self.block_table = torch.arange(num_blocks).flip(0).reshape(width, -1).T.contiguous()
        self.slots = torch.arange(self.num_requests).flip(0)
        geometry = CacheGeometry.for_engine(
            model.loaded.config,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=self.num_requests,
            max_num_tokens=self.num_requests * longest,
            max_drafts=max_drafts,
            has_drafter=True,
        )
        self.caches = model.loaded.backbone.create_caches(geometry)
        self.done: list[list[int]] = [[] for _ in range(num_requests)]

    def run(
        self,
        kind: StepKind,
        parts: Sequence[list[int]],
        accepted: Sequence[int] | None = None,
        rows: PrefillRows = ALL_ROWS,
    ) -> None:
        """A target step on `parts`; its first `accepted` rows (default all) become final.

        `rows` are those that each layer runs of every request.
        """
        device = self.model.backend.runtime.device
        backbone, drafter = self.model.loaded.backbone, self.model.drafter
        width = self.model.loaded.config.engram_max_ngram_size - 1
        lens = [len(part) for part in parts]
        final = lens if accepted is None else list(accepted)
        history = [([-1] * width + ids)[-width:] for ids in [*self.done, []]]
        replay = batch_replay(
            [rows] * len(parts) + [ALL_ROWS], [*map(len, self.done), 0], [*lens, 0]
        )
        if replay is not None:
            replay = replace(replay, limits=replay.limits.to(device))
        batch = StepBatch(
            kind=kind,
            input_ids=torch.tensor([i for part in parts for i in part] + [0], device=device),
            query_lens=torch.tensor([*lens, 0], device=device),
            context_lens=torch.tensor([len(ids) for ids in self.done] + [0], device=device),
            seq_slots=self.slots.to(device),
            block_table=self.block_table.to(device),
            history=torch.tensor(history, device=device),
            logits_rows=torch.zeros(0, dtype=torch.int64, device=device),
            max_query_len=max(lens),
            max_key_len=max(n + len(ids) for n, ids in zip(lens, self.done, strict=True)),
            replay=replay,
        )

        def work() -> None:
            plan = backbone.plan(batch, self.caches.geometry)
            state = backbone.run(plan, self.caches)
            counts = torch.tensor([*final, 0], device=device)
            drafter.inject(state, plan, counts, self.caches)

        stream = self.model.backend.runtime.compute_stream
        stream.enqueue(work)
        stream.synchronize()
        self.done = [
            ids + part[:count] for ids, part, count in zip(self.done, parts, final, strict=True)
        ]

    def draft(
        self,
        anchors: Sequence[int],
        params: SampleParams | None = None,
        num_drafts: int | None = None,
    ) -> Drafts:
        """Drafts of all requests after `anchors`, without the padding request."""
        batch = self.anchors(anchors)._replace(params=params)
        found: list[Drafts] = []
        stream = self.model.backend.runtime.compute_stream
        stream.enqueue(
            lambda: found.append(
                self.model.drafter.draft(batch, self.caches, num_drafts=num_drafts)
            )
        )
        stream.synchronize()
        return Drafts(*(value[:-1].cpu() for value in found[0]))

    def anchors(self, anchors: Sequence[int]) -> DraftBatch:
        """Anchors after what each request has done, and a padding request."""
        device = self.model.backend.runtime.device
        zeros = torch.zeros(self.num_requests, dtype=torch.int64, device=device)
        return DraftBatch(
            anchor_ids=torch.tensor([*anchors, 0], device=device),
            anchor_positions=torch.tensor([len(ids) for ids in self.done] + [0], device=device),
            seq_slots=self.slots.to(device),
            floors=zeros,
            valid=torch.arange(self.num_requests, device=device) < len(anchors),
        )


def _together(model: Model) -> tuple[Company, Drafts]:
    """All drafts of a fixture in one batch, their prompts in two chunks cut at odd places."""
    longest = max(len(draft.context) for draft in model.drafts) + 8
    company = Company(model, len(model.drafts), longest)
    cuts = [len(d.context) * (1 + number % 4) // 5 for number, d in enumerate(model.drafts)]
    company.run(StepKind.PREFILL, [d.context[:n] for d, n in zip(model.drafts, cuts, strict=True)])
    company.run(StepKind.PREFILL, [d.context[n:] for d, n in zip(model.drafts, cuts, strict=True)])
    return company, company.draft([draft.anchor for draft in model.drafts])


def check_company(model: Model) -> None:
    _, drafts = _together(model)
    for row, draft in enumerate(model.drafts):
        found = {name: value[row] for name, value in drafts._asdict().items()}
        check_draft(model, draft, found)
        expected = torch.tensor(draft.expected["confidence"])
        assert torch.allclose(drafts.confidences[row], expected, rtol=0.0, atol=1e-3)


def test_company_of_all_requests_gives_the_golden_drafts(exact: Model) -> None:
    check_company(exact)


def test_emulated_ascend950_gives_the_golden_drafts(emulated: Model) -> None:
    check_company(emulated)


def test_company_changes_no_bit_of_a_draft(model: Model) -> None:
    _, drafts = _together(model)
    for row, draft in enumerate(model.drafts):
        alone = Company(model, 1, len(draft.context) + 8)
        alone.run(StepKind.PREFILL, [draft.context[:-3]])
        for token in draft.context[-3:]:
            alone.run(StepKind.DECODE, [[token]])
        for name, value in alone.draft([draft.anchor])._asdict().items():
            assert torch.equal(value[0], getattr(drafts, name)[row]), (draft.name, name)


def test_rows_dropped_before_the_drafters_window_change_no_bit_of_a_draft(model: Model) -> None:
    config, draft = model.loaded.config, model.drafts[-1]
    length, window = len(draft.context), config.sliding_window
    source = config.last_kv_source
    assert source is not None
    schedule = exact_rows(config, length, 0, num_final_rows=window)
    rows = PrefillRows(cuts=tuple(cut for cut in schedule.cuts if cut.layer >= source))
    assert rows.limits(config.num_hidden_layers)[0] == length - window
    found = []
    for kept in (ALL_ROWS, rows):
        company = Company(model, 1, length + 8)
        # The first chunk ends before any row goes on to the last layer.
        for part in (draft.context[:20], draft.context[20:-5], draft.context[-5:]):
            company.run(StepKind.PREFILL, [part], rows=kept)
        found.append(company.draft([draft.anchor]))
    for name, value in found[0]._asdict().items():
        assert torch.equal(value, getattr(found[1], name)), name


def _following(model: Model, draft: Draft) -> list[int]:
    """Greedy tokens of the draft's case from its anchor on."""
    cases = json.loads((model.folder / "cases.json").read_text())["cases"]
    (case,) = [case for case in cases if draft.name.startswith(case["name"] + ".")]
    ids: list[int] = case["greedy_ids"]
    return ids[draft.expected["after_generated"] :]


def test_rejected_rows_and_scratch_rows_leave_no_trace(model: Model) -> None:
    contexts = [draft.context for draft in model.drafts[-4:]]
    following = [_following(model, draft)[:8] for draft in model.drafts[-4:]]
    longest = max(len(ids) for ids in contexts) + 24
    company = Company(model, 4, longest, max_drafts=5)
    company.run(StepKind.PREFILL, contexts)
    company.draft([ids[0] for ids in following])
    # Another number of rows and of accepted rows for each request, twice.
    first, second = [1, 2, 4, 6], [2, 1, 1, 2]
    wrong = [3, 4, 5, 6, 7]
    parts = [ids[:n] + wrong[: 6 - n] for ids, n in zip(following, first, strict=True)]
    company.run(StepKind.DECODE, parts, first)
    company.draft([ids[n] for ids, n in zip(following, first, strict=True)])
    parts = [
        ids[n : n + m] + wrong[: 3 - m] for ids, n, m in zip(following, first, second, strict=True)
    ]
    company.run(StepKind.DECODE, parts, second)
    ends = [n + m for n, m in zip(first, second, strict=True)]
    anchors = [(ids + wrong)[n] for ids, n in zip(following, ends, strict=True)]
    drafts = company.draft(anchors)
    clean = Company(model, 4, longest)
    clean.run(
        StepKind.PREFILL,
        [ids + more[:n] for ids, more, n in zip(contexts, following, ends, strict=True)],
    )
    for found, expected in zip(drafts, clean.draft(anchors), strict=True):
        assert torch.equal(found, expected)


def test_drafts_are_drawn_from_their_own_random_stream(model: Model) -> None:
    company, greedy = _together(model)
    runtime, num = model.backend.runtime, company.num_requests
    zeros = torch.zeros(num, device=runtime.device)
    index = torch.arange(num, device=runtime.device)
    params = SampleParams(
        temperature=torch.where(index % 2 == 0, 0.0, 0.8),
        top_k=torch.ones_like(index),  # not the drafter's: q is the plain softmax
        top_p=zeros + 0.1,
        min_p=zeros + 0.5,
        seeds=index + 7,
        sample_index=torch.zeros_like(index),
        positions=torch.zeros_like(index),
    )
    drafts = company.draft([draft.anchor for draft in model.drafts], params)
    assert torch.equal(drafts.tokens[::2], greedy.tokens[::2])
    assert not torch.equal(drafts.tokens[1::2], greedy.tokens[1::2])
    draw = model.backend.ops[sampling.sample_tokens]
    lens = [len(draft.context) for draft in model.drafts]
    anchors = torch.tensor(lens, device=runtime.device)
    for place in range(drafts.tokens.shape[1]):
        plain = params._replace(top_k=torch.zeros_like(index), top_p=zeros + 1.0, min_p=zeros)
        # A number for each place of each block, so that no two blocks share one.
        own = SampleParams(*(column[:-1] for column in plain))._replace(
            positions=anchors * drafts.tokens.shape[1] + place
        )
        logits = drafts.logits[:, place].to(runtime.device)

        def drawn(logits: Tensor = logits, own: SampleParams = own) -> Tensor:
            return draw(logits, own, SampleWork.RANDOM, purpose=Purpose.DRAFT).cpu()

        tokens = run_on(runtime.compute_stream, drawn)
        assert torch.equal(tokens, drafts.tokens[:, place])


def test_fewer_drafts_are_the_first_of_all(model: Model) -> None:
    company, drafts = _together(model)
    fewer = company.draft([draft.anchor for draft in model.drafts], num_drafts=2)
    for some, every in zip(fewer, drafts, strict=True):
        assert torch.equal(some, every[:, :2])
    batch = company.anchors([draft.anchor for draft in model.drafts])
    with pytest.raises(ConfigError, match=r"6 drafts .* dspark_block_size 5"):
        model.drafter.draft(batch, company.caches, num_drafts=6)


def test_temperatures_calibrate_confidences_place_by_place(model: Model) -> None:
    company, before = _together(model)
    temperatures = [0.5, 1.0, 2.0, 4.0, 8.0]
    model.drafter.calibrate(temperatures)
    try:
        after = company.draft([draft.anchor for draft in model.drafts])
    finally:
        model.drafter.calibrate([1.0] * 5)
    assert torch.equal(before.confidence_logits, after.confidence_logits)
    expected = torch.sigmoid(before.confidence_logits / torch.tensor(temperatures))
    assert torch.allclose(after.confidences, expected, rtol=0.0, atol=1e-6)
    for values, message in (
        ([1.0] * 4, "4 confidence temperatures"),
        ([1.0, 1.0, 0.0, 1.0, 1.0], "temperature 2 is 0.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.drafter.calibrate(values)


@pytest.mark.parametrize("setting", ["pre_norm", "post_norm"])
def test_confidence_head_sees_what_the_checkpoint_states(
    tmp_path: Path, backend_name: str, setting: str
) -> None:
    source = GOLDEN / "tiny_a" / "checkpoint"
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(source, checkpoint)
    raw = json.loads((source / "config.json").read_text())
    raw["text_config"]["confidence_head_input"] = setting
    # The fixtures' files are read-only.
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").write_text(json.dumps(raw))
    backend = load_backend(BackendConfig(backend_name, Numerics.EXACT))
    loaded = load_model(checkpoint, backend, max_positions=64, with_drafter=True)
    ids = [5, 6, 7, 8]
    trace = trace_tokens(loaded, backend, ids)
    backend.close()
    stored = CheckpointReader(checkpoint)
    hidden = trace["draft.hidden"].double()
    if setting == "post_norm":
        mean_square = hidden.square().mean(-1, keepdim=True) + loaded.config.rms_norm_eps
        weight = stored.read("mtp.2.norm.weight").dequantize().double()
        hidden = hidden * mean_square.rsqrt() * weight
    before = [ids[-1], *trace["draft.tokens"].flatten().tolist()[:-1]]
    features = stored.read("mtp.2.markov_head.embed.weight").dequantize().double()[before]
    line = stored.read("mtp.2.confidence_head.proj.weight").dequantize().double()
    expected = torch.cat((hidden, features), dim=1) @ line.T
    assert torch.allclose(trace["draft.confidence_logits"].double(), expected, atol=1e-4)


def test_released_slot_leaves_no_draft_row_to_read(model: Model) -> None:
    company = Company(model, 2, 16)
    company.run(StepKind.PREFILL, [[5, 6, 7, 8], [9, 8, 7, 6]])
    company.caches.poison_slot(int(company.slots[0]))
    drafts = company.draft([3, 3])
    assert drafts.logits[0].isnan().any()
    assert drafts.logits[1].isfinite().all()


def test_checkpoint_without_drafter_is_refused_by_name(tmp_path: Path, backend_name: str) -> None:
    checkpoint = tmp_path / "no_drafter"
    shutil.copytree(GOLDEN / "tiny_a" / "checkpoint", checkpoint)
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["text_config"]["num_nextn_predict_layers"] = 0
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").write_text(json.dumps(raw))
    backend = load_backend(BackendConfig(backend_name, Numerics.EXACT))
    with pytest.raises(ConfigError, match="no_drafter has no drafter"):
        load_model(checkpoint, backend, random_seed=1, with_drafter=True)
    backend.close()


def test_random_weights_have_a_drafter_too(backend_name: str) -> None:
    backend = load_backend(BackendConfig(backend_name, Numerics.EXACT))
    checkpoint = GOLDEN / "tiny_a" / "checkpoint"
    loaded = load_model(checkpoint, backend, max_positions=64, random_seed=3, with_drafter=None)
    trace = trace_tokens(loaded, backend, [5, 6, 7])
    backend.close()
    assert loaded.marks == ("random_weights",)
    assert trace["draft.logits"].isfinite().all()
