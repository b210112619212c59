"""Options, records, packing and whole models of the CUDA backend, interpreted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig, override
from deepinfer.device import formats
from deepinfer.device.backend import CacheKind
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import (
    CapabilityError,
    ConfigError,
    ContractError,
    DeviceMemoryError,
)
from deepinfer.device.numerics import Numerics
from deepinfer.device.runtime import StepKind
from deepinfer.device.weights import WeightFormat, stored_from_float
from deepinfer.model.loading import load_model
from deepinfer.model.trace_run import trace_tokens
from deepinfer_cuda_sm100.backend import CudaBackend
from deepinfer_cuda_sm100.caches import RecordRows, row_bytes
from deepinfer_cuda_sm100.options import CudaOptions, EngramPlace
from deepinfer_cuda_sm100.packing import matrix_operand, stacked_operand
from deepinfer_kernels.quant.gemm_triton import dequantize_truth

GOLDEN = Path(__file__).parents[1] / "data/golden/tiny_a"
CPU = torch.device("cpu")


def create(numerics: Numerics) -> CudaBackend:
    options = {"interpret": True}
    return CudaBackend(
        BackendConfig("cuda_sm100", numerics, options), CudaOptions.from_mapping(options)
    )


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    made = create(Numerics.NORMATIVE)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interpet": True}, "interpet is unknown .* it has block_scaled"),
        ({"interpret": 1}, "interpret is 1; expected true or false"),
        ({"device_index": -1}, "device_index is -1"),
        ({"device_index": True}, "device_index is True"),
        ({"engram_tables": "disk"}, "engram_tables is 'disk'; expected one of"),
        ({"graphs": "off"}, "graphs is 'off'"),
        ({"interpret": True, "block_scaled": True}, "block_scaled is true together with interpret"),
    ],
)
def test_bad_option_is_named_with_its_value(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CudaOptions.from_mapping(options)


def test_options_are_read() -> None:
    options = CudaOptions.from_mapping({"engram_tables": "host", "graphs": False})
    assert options.engram_tables is EngramPlace.HOST
    assert not options.graphs


def test_timed_events_stand_on_the_host_clock(backend: CudaBackend) -> None:
    runtime = backend.runtime
    before = runtime.now_us()
    event = runtime.compute_stream.record_event(timed=True)
    assert before <= event.time_us <= runtime.now_us()
    with pytest.raises(ContractError, match="pass timed=True"):
        _ = runtime.compute_stream.record_event().time_us


def test_full_device_is_told_in_the_engines_words(backend: CudaBackend) -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the docs")

    with pytest.raises(DeviceMemoryError, match=r"Tried to allocate 2 GiB\.$"):
        backend.runtime.compute_stream.enqueue(work)
    backend.runtime.compute_stream.enqueue(lambda: None)


def test_closed_runtime_takes_no_calls() -> None:
    backend = create(Numerics.EXACT)
    stream = backend.runtime.compute_stream
    backend.close()
    with pytest.raises(ContractError, match="stream 'compute' is closed"):
        stream.enqueue(lambda: None)
    with pytest.raises(ContractError, match="runtime is closed"):
        backend.runtime.pinned((1,), torch.float32)


@pytest.mark.parametrize(
    ("kind", "width", "expected"),
    [
        (CacheKind.WINDOW, 512, 528),
        (CacheKind.COMPRESSED, 512, 288),
        (CacheKind.INDEX, 128, 68),
    ],
)
def test_records_have_the_published_sizes(
    backend: CudaBackend, kind: CacheKind, width: int, expected: int
) -> None:
    assert backend.cache_row_bytes(kind, width) == expected
    cache = backend.create_cache(kind, 3, width)
    assert cache.row_bytes == cache.byte_view(1, 2).shape[1] == expected


def test_exact_numerics_keep_fp32_rows() -> None:
    assert row_bytes("plain", 512) == 2048
    assert RecordRows("plain", 2, 8, CPU).record == "f32"


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("factor", [1.0, 2.0**-12, 2.0**-30, 100.0])
def test_stored_values_come_back(generator: torch.Generator, fmt: str, factor: float) -> None:
    round_trip = {
        "mxfp8": formats.round_trip_a8,
        "nvfp4": formats.round_trip_q4_e4m3,
        "mxfp4": formats.round_trip_q4_ue8m0,
    }[fmt]
    values = round_trip(torch.randn(200, 64, generator=generator) * factor)
    cache = RecordRows(fmt, 200, 64, CPU)
    slots = torch.randperm(200, generator=generator)
    cache.pack(slots, values)
    assert torch.equal(cache.unpack(slots), values)


@pytest.mark.parametrize("fmt", ["plain", "mxfp8", "nvfp4", "mxfp4"])
def test_poisoned_rows_are_nan_and_no_others(fmt: str) -> None:
    cache = RecordRows(fmt, 4, 32, CPU)
    cache.poison(torch.tensor([1, 3]))
    values = cache.unpack(torch.arange(4))
    assert values[[1, 3]].isnan().all()
    assert (values[[0, 2]] == 0).all()


def test_full_device_is_refused_with_figures_and_a_remedy(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> RecordRows:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("deepinfer_cuda_sm100.backend.RecordRows", full)
    with pytest.raises(CapabilityError, match=r"no memory for 9 rows of a window cache: 1\.00 GiB"):
        backend.create_cache(CacheKind.WINDOW, 9, 64)


def test_rows_that_do_not_exist_have_no_bytes() -> None:
    with pytest.raises(ContractError, match=r"rows 3\.\.5 of a cache of 4 rows"):
        RecordRows("mxfp8", 4, 32, CPU).byte_view(3, 3)


def test_width_without_whole_groups_is_refused() -> None:
    with pytest.raises(ContractError, match="rows of 48 values"):
        RecordRows("mxfp8", 4, 48, CPU)


@pytest.mark.parametrize("fmt", list(WeightFormat))
@pytest.mark.parametrize("numerics", list(Numerics))
def test_packed_matrices_have_the_stored_values(
    generator: torch.Generator, fmt: WeightFormat, numerics: Numerics
) -> None:
    # 40 rows are no multiple of a tile's 32: each part keeps its own scales.
    parts = [stored_from_float(torch.randn(n, 64, generator=generator), fmt) for n in (40, 33)]
    packed = dequantize_truth(matrix_operand(parts, numerics, CPU))
    assert torch.equal(packed, torch.cat([part.dequantize() for part in parts]))


def test_experts_are_stacked_in_order(generator: torch.Generator) -> None:
    experts = [
        [stored_from_float(torch.randn(32, 64, generator=generator), WeightFormat.MXFP4)]
        for _ in range(3)
    ]
    packed = dequantize_truth(stacked_operand(experts, Numerics.NORMATIVE, CPU))
    for index, (part,) in enumerate(experts):
        assert torch.equal(packed[index], part.dequantize())


def test_matrices_stored_differently_are_refused(generator: torch.Generator) -> None:
    values = torch.randn(32, 64, generator=generator)
    parts = [stored_from_float(values, fmt) for fmt in (WeightFormat.BF16, WeightFormat.MXFP4)]
    with pytest.raises(ConfigError, match="formats bf16, mxfp4; store them alike"):
        matrix_operand(parts, Numerics.NORMATIVE, CPU)


@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DECODE])
def test_short_golden_case(kind: StepKind) -> None:
    backend = create(Numerics.EXACT)
    loaded = load_model(GOLDEN / "checkpoint", backend, max_positions=64)
    cases = json.loads((GOLDEN / "cases.json").read_text())
    arrays = load_file(GOLDEN / "cases.safetensors")
    case = cases["cases"][2]
    prompt = case["prompt_ids"]
    answered = 0 if kind is StepKind.DECODE else 3
    trace = trace_tokens(loaded, backend, prompt + case["greedy_ids"][:answered], kind=kind)
    backend.close()
    limit = 1e-4 * cases["logit_scale"]
    expected = arrays[f"{case['name']}.prefill_logits"]
    assert (trace["logits"][: len(prompt)] - expected).abs().max() <= limit
    greedy = trace["logits"][len(prompt) - 1 :].argmax(-1).tolist()
    assert greedy == case["greedy_ids"][: answered + 1]


def test_engine_generates_on_interpreted_kernels() -> None:
    config = override(
        EngineConfig(),
        {
            "checkpoint.path": str(GOLDEN / "checkpoint"),
            "numerics": "exact",
            "max_model_len": 64,
            "scheduler.max_num_seqs": 2,
        },
    )
    case = json.loads((GOLDEN / "cases.json").read_text())["cases"][1]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM(config, backend=create(Numerics.EXACT)) as llm:
        result = llm.generate([case["prompt_ids"]], params)[0]
    assert list(result.outputs[0].token_ids) == case["greedy_ids"][:3]


@pytest.mark.parametrize("numerics", list(Numerics))
def test_chunks_change_no_bit(numerics: Numerics) -> None:
    backend = create(numerics)
    loaded = load_model(GOLDEN / "checkpoint", backend, max_positions=64)
    ids = json.loads((GOLDEN / "cases.json").read_text())["cases"][2]["prompt_ids"][:3]
    whole = trace_tokens(loaded, backend, ids)
    parts = trace_tokens(loaded, backend, ids, chunk=2)
    backend.close()
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
