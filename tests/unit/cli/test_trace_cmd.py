"""`deepinfer trace`: what is written, the comparison's verdict, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepinfer.cli import main
from deepinfer.cli.trace_cmd import METADATA_KEY

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden" / "tiny_a" / "checkpoint"
IDS = [5, 6, 7, 8, 9]


def _trace(out: Path, *extra: str, tokens: str = "5,6,7,8,9") -> int:
    common = ["--checkpoint", str(GOLDEN), "--numerics", "exact"]
    return main(["trace", "--tokens", tokens, "--out", str(out), *common, *extra])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of `IDS`."""
    file = tmp_path_factory.mktemp("trace") / "whole.safetensors"
    assert _trace(file) == 0
    return file


@pytest.fixture
def spoilt(written: Path, tmp_path: Path) -> Path:
    """The same trace with wrong streams from position 3 of layer 4 on."""
    tensors = load_file(written)
    tensors["layers.4.streams"][3:] += 1.0
    tensors["logits"] += 1.0
    file = tmp_path / "spoilt.safetensors"
    save_file(tensors, file)
    return file


def test_published_tensors_have_their_shapes_and_dtypes(written: Path) -> None:
    found = {name: (value.shape, value.dtype) for name, value in load_file(written).items()}
    assert found["logits"] == ((5, 320), torch.float32)
    assert found["layers.8.expert_ids"] == ((5, 2), torch.int64)
    assert found["layers.8.expert_weights"] == ((5, 2), torch.float32)
    assert found["layers.2.selected_positions"] == ((5, 8), torch.int64)
    assert found["layers.5.candidate_blocks"] == ((5, 4), torch.int64)
    assert found["engram.4.hash_ids"] == ((5, 6), torch.int64)
    assert found["layers.0.streams"] == ((5, 4, 64), torch.float32)
    assert found["final.hidden"] == ((5, 64), torch.float32)
    assert found["draft.context"] == ((4, 64), torch.float32)
    assert found["draft.2.streams"] == ((5, 4, 64), torch.float32)
    assert found["draft.tokens"] == ((5, 1), torch.int64)
    assert found["draft.logits"] == ((5, 320), torch.float32)


def test_drafter_can_be_left_out(written: Path, tmp_path: Path) -> None:
    file = tmp_path / "backbone.safetensors"
    assert _trace(file, "--no-drafter") == 0
    found, whole = load_file(file), load_file(written)
    assert found.keys() == {name for name in whole if not name.startswith("draft.")}
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


def test_same_command_writes_the_same_bytes(written: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    assert _trace(again) == 0
    assert again.read_bytes() == written.read_bytes()


def test_metadata_say_where_the_trace_comes_from(written: Path) -> None:
    with safe_open(written, framework="pt") as file:
        origin = json.loads(file.metadata()[METADATA_KEY])
    assert origin.pop("versions").keys() == {"deepinfer-hal", "torch"}
    assert origin == {
        "backend": "reference",
        "checkpoint": "checkpoint",
        "marks": [],
        "numerics": "exact",
        "token_ids": IDS,
    }


def test_last_keeps_the_last_positions(written: Path, tmp_path: Path) -> None:
    file = tmp_path / "last.safetensors"
    assert _trace(file, "--last", "2") == 0
    whole, last = load_file(written), load_file(file)
    assert whole.keys() == last.keys()
    for name, value in last.items():
        # The anchor is no context; a block is not cut.
        first = {"draft.context": -1}.get(name, 0 if name.startswith("draft.") else -2)
        assert torch.equal(whole[name][first:], value), name


@pytest.mark.parametrize("way", [["--decode"], ["--chunk", "2"]])
def test_ways_of_running_agree(way: list[str], written: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    assert _trace(file, *way) == 0
    assert main(["trace", "--compare", str(written), str(file), "--bound", "1e-5"]) == 0


def test_prompt_is_tokenised_with_the_checkpoints_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    arguments = ["trace", "ab", "--out", str(file), "--checkpoint", str(GOLDEN)]
    assert main([*arguments, "--numerics", "exact"]) == 0
    with safe_open(file, framework="pt") as stored:
        ids = json.loads(stored.metadata()[METADATA_KEY])["token_ids"]
    assert len(ids) == len(load_file(file)["logits"]) > 0


def test_comparison_names_the_first_difference_first(
    written: Path, spoilt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert main(["trace", "--compare", str(written), str(spoilt), "--json", str(report)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("first difference: layers.4.streams at position 3 ")
    figures: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["figures"]
    assert figures["first"]["name"] == "layers.4.streams"
    assert figures["first"]["max_abs"] == pytest.approx(1.0, rel=1e-3)
    beyond = [e["name"] for e in figures["tensors"] if e["position"] is not None]
    assert beyond == ["layers.4.streams", "logits"]


def test_bound_decides(written: Path, spoilt: Path) -> None:
    assert main(["trace", "--compare", str(written), str(spoilt), "--bound", "10"]) == 0


def test_missing_tensor_gives_a_report_that_json_can_hold(written: Path, tmp_path: Path) -> None:
    tensors = load_file(written)
    del tensors["layers.0.streams"]
    other, report = tmp_path / "less.safetensors", tmp_path / "report.json"
    save_file(tensors, other)
    assert main(["trace", "--compare", str(written), str(other), "--json", str(report)]) == 1
    first = json.loads(report.read_text(encoding="utf-8"))["figures"]["first"]
    assert (first["name"], first["error"]) == ("layers.0.streams", None)


@pytest.mark.parametrize(
    ("tokens", "extra", "said"),
    [
        ("1,320", [], "token id 320 is not in the vocabulary (vocab_size 320)"),
        ("1,-1", [], "token id -1"),
        ("1,x", [], "--tokens is '1,x'"),
        ("1,2,3", ["--set", "max_model_len=2"], "3 tokens to trace, the limit is 2"),
        ("1", ["--chunk", "0"], "--chunk is 0"),
        ("1", ["--last", "0"], "--last is 0"),
        ("1", ["--decode", "--chunk", "2"], "--chunk 2 with --decode"),
    ],
)
def test_bad_request_is_refused_by_name(
    tokens: str, extra: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.safetensors"
    assert _trace(out, *extra, tokens=tokens) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_missing_output_folder_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _trace(tmp_path / "none" / "x.safetensors") == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["text", "--tokens", "1"]])
def test_prompt_or_tokens_is_needed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *arguments, "--out", "never.safetensors"]) == 2
    assert "a prompt or --tokens" in capsys.readouterr().err


def test_empty_prompt_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.safetensors"
    assert main(["trace", "", "--out", str(out), "--checkpoint", str(GOLDEN)]) == 2
    assert "no token to trace" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"x", b"\x08\0\0\0\0\0\0\0nonsense"])
def test_unreadable_file_is_named(
    content: bytes | None, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.safetensors"
    if content is not None:
        bad.write_bytes(content)
    assert main(["trace", "--compare", str(written), str(bad)]) == 2
    assert str(bad) in capsys.readouterr().err


def test_checkpoint_is_not_taken_for_a_trace(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = GOLDEN / "model-00001-of-00002.safetensors"
    assert main(["trace", "--compare", str(written), str(shard)]) == 2
    assert "is not of a trace" in capsys.readouterr().err


@pytest.mark.parametrize("bound", ["nan", "inf", "-1"])
def test_bound_without_meaning_is_refused(
    bound: str, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--compare", str(written), str(written), f"--bound={bound}"]) == 2
    assert "--bound is" in capsys.readouterr().err


def test_comparison_refuses_what_it_would_ignore(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--compare", str(written), str(written), "--tokens", "1"]) == 2
    assert "tokens is given with --compare" in capsys.readouterr().err
