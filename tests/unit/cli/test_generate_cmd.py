"""`deepinfer generate` over a scripted engine."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.cli import main
from deepinfer.config import EngineConfig
from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.timeline import Timeline


class ScriptedLLM:
    """Answers "a prompt" with " answer to a prompt", three characters a token."""

    seen_params: list[SamplingParams]
    seen_configs: list[EngineConfig]

    timeline = Timeline()
    speculation = None

    def __init__(self, config: EngineConfig, *, timeline_file: Path | None = None) -> None:
        self.seen_configs.append(config)

    def __enter__(self) -> ScriptedLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def generate(self, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        self.seen_params.append(params)
        return [self._answer(prompt, params, f" answer to {prompt}") for prompt in prompts]

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        self.seen_params.append(params)
        text = f" streamed answer to {prompt}"
        for length in range(3, len(text), 3):
            yield self._answer(prompt, params, text[:length], finished=False)
        yield self._answer(prompt, params, text)

    def _answer(
        self, prompt: str, params: SamplingParams, text: str, *, finished: bool = True
    ) -> RequestOutput:
        reason = FinishReason.ERROR if prompt == "bad" else FinishReason.STOP
        answers = [
            CompletionOutput(
                index=index,
                token_ids=list(range(len(text) // 3)),
                text=text,
                finish_reason=reason if finished else None,
                error="non-finite logits" if prompt == "bad" else None,
            )
            for index in range(params.n)
        ]
        return RequestOutput("r", prompt, [1, 2], answers, finished)


@pytest.fixture(autouse=True)
def llm(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLLM]:
    """Stand in for the public API."""
    module = types.ModuleType("deepinfer.api")
    module.__dict__["LLM"] = ScriptedLLM
    monkeypatch.setitem(sys.modules, "deepinfer.api", module)
    monkeypatch.setattr(ScriptedLLM, "seen_params", [], raising=False)
    monkeypatch.setattr(ScriptedLLM, "seen_configs", [], raising=False)
    return ScriptedLLM


def test_single_prompt_is_streamed_without_repeating_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "one"]) == 0
    assert capsys.readouterr().out == " streamed answer to one\n"


def test_no_stream_waits_for_the_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one", "--no-stream"]) == 0
    assert capsys.readouterr().out == " answer to one\n"


def test_several_prompts_are_blocks_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one", "two"]) == 0
    assert capsys.readouterr().out == ("[1] one\n answer to one\n\n[2] two\n answer to two\n\n")


def test_several_answers_are_numbered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one", "--n", "2"]) == 0
    assert capsys.readouterr().out == ("[1.1] one\n answer to one\n\n[1.2] one\n answer to one\n\n")


def test_streaming_several_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one", "two", "--stream"]) == 2
    assert "--stream with 2 prompts" in capsys.readouterr().err


def test_summary_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "one", "--no-stream"])
    assert "4 tokens in" in capsys.readouterr().err


def test_flags_override_the_defaults_of_the_configuration(llm: type[ScriptedLLM]) -> None:
    words = [
        "generate",
        "one",
        "--max-tokens",
        "7",
        "--stop",
        "X",
        "--stop",
        "Y",
        "--ignore-eos",
        "--top-p",
        "0.5",
    ]
    assert main([*words, "--set", "sampling={max_tokens: 3, temperature: 0.25}"]) == 0
    assert llm.seen_params == [
        SamplingParams(max_tokens=7, temperature=0.25, stop=["X", "Y"], ignore_eos=True, top_p=0.5)
    ]


def test_engine_gets_the_resolved_configuration(llm: type[ScriptedLLM]) -> None:
    main(["generate", "one", "--backend", "other"])
    assert [config.backend.name for config in llm.seen_configs] == ["other"]


def test_bad_parameter_is_refused_before_the_engine_starts(
    llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "one", "--max-tokens", "0"]) == 2
    assert "max_tokens" in capsys.readouterr().err
    assert llm.seen_configs == []


def test_failed_request_is_code_1_and_the_others_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "bad", "two"]) == 1
    captured = capsys.readouterr()
    assert "answer to two" in captured.out
    assert "prompt 1 failed: non-finite logits" in captured.err


def test_json_holds_results_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert main(["generate", "one", "two", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert [result["outputs"][0]["text"] for result in figures["results"]] == [
        " answer to one",
        " answer to two",
    ]
    assert (figures["num_prompts"], figures["num_prompt_tokens"]) == (2, 4)
    assert (figures["num_failed"], figures["num_output_tokens"]) == (0, 8)


def test_report_without_a_folder_is_refused_before_work(
    llm: type[ScriptedLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "one", "--json", str(tmp_path / "absent" / "r.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert llm.seen_configs == []


def test_show_config_needs_no_prompt(
    llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["generate", "--show-config"])
    assert end.value.code == 0
    assert "backend:" in capsys.readouterr().out
    assert llm.seen_configs == []
