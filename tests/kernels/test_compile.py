"""Every kernel compiles for SM90 and SM100 without a GPU; in a process that does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer_kernels.compile import misaligned_loads


@pytest.fixture(scope="module", params=[90, 100])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    out: Path = tmp_path_factory.mktemp("compile") / "kernels.json"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [
            sys.executable, "-m", "deepinfer_kernels.compile", "--arch", str(request.param),
            "--out", str(out),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads(out.read_text())
    return results


def test_no_kernel_exceeds_its_limits(compiled: list[dict[str, Any]]) -> None:
    faults = {result["kernel"]: result["faults"] for result in compiled if result["faults"]}
    assert faults == {}


def test_every_jitted_entry_is_compiled(compiled: list[dict[str, Any]]) -> None:
    found = {result["kernel"].rsplit(".", 1)[0] for result in compiled}
    folder = Path(__file__).parents[2] / "kernels/deepinfer_kernels"
    files = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*_triton.py")
        if "[grid]" in path.read_text() or "[(" in path.read_text()
    }
    assert files <= found


_LOADS = """
	.loc	1 107 16                        // records_triton.py:107:16 @[ scores_triton.py:46:20 ]
	@%p2 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd3 + 0 ];
	.loc	2 40 12                         // scores_triton.py:40:12
	@%p1 ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd2 + 0 ];
	.loc	1 80 16                         // records_triton.py:80:16 @[ scores_triton.py:33:20 ]
	@%p26 cp.async.ca.shared.global [ %r25 + 0 ], [ %rd25 + 0 ], 0x8, %r101;
	.loc	1 114 8                         // records_triton.py:114:8 @[ scores_triton.py:46:20 ]
	@%p2 ld.global.b8 %rs1, [ %rd5 + 0 ];
"""


@pytest.mark.parametrize(
    ("record_bytes", "found"),
    [
        ((528, 288), []),
        ((68,), ["records_triton.py:107 loads 16", "records_triton.py:80 loads 8"]),
        ((528, 66), ["records_triton.py:107 loads 16", "records_triton.py:80 loads 8"]),
        ((), []),
    ],
)
def test_loads_wider_than_records_are_aligned_are_found(
    record_bytes: tuple[int, ...], found: list[str]
) -> None:
    faults = misaligned_loads(_LOADS, record_bytes)
    assert [fault.split(" bytes")[0] for fault in faults] == found


def test_a_kernel_whose_record_loads_are_not_seen_is_at_fault() -> None:
    assert "their alignment is not known" in misaligned_loads("ret;", (68,))[0]


_WRONG_ALIGNMENT = """
import sys
from pathlib import Path

import deepinfer_kernels.kv

folder = Path(sys.argv[1])
source = (Path(deepinfer_kernels.kv.__path__[0]) / "records_triton.py").read_text()
stated = "tl.multiple_of(row * BYTES, ALIGNED)"
assert stated in source
(folder / "records_triton.py").write_text(source.replace(stated, "tl.multiple_of(row * BYTES, 16)"))
deepinfer_kernels.kv.__path__.insert(0, str(folder))
from deepinfer_kernels.compile import compile_case
from deepinfer_kernels.indexer import scores_triton

for arch in (90, 100):
    print(compile_case(scores_triton, scores_triton.COMPILE_CASES[0], arch).faults)
"""


def test_index_keys_read_16_bytes_at_a_time_are_found(tmp_path: Path) -> None:
    """The fault of the first GPU run, planted: the compiler believes 68-byte records aligned."""
    done = subprocess.run(
        [sys.executable, "-c", _WRONG_ALIGNMENT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loads 16 bytes at once, records are aligned to 4") == 2
