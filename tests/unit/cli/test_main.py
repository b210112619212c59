"""The frame of the command line: light start, exit codes, messages."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from deepinfer.cli import main
from deepinfer.cli.main import COMMANDS, EXIT_BROKEN_PIPE, Command
from deepinfer.device.errors import CapabilityError

Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Make the program have one command, `work`, which runs what the test gives."""

    def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        subparsers.add_parser("work")

    def install(run: Run) -> None:
        module = types.ModuleType("deepinfer.cli.work_cmd")
        module.__dict__.update(add_parser=add_parser, run=run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        # The package exports a function of the module's name, so the module is found by import.
        frame = importlib.import_module("deepinfer.cli.main")
        monkeypatch.setattr(frame, "COMMANDS", (Command("work", module.__name__, "works"),))

    return install


def _raise(error: BaseException) -> Run:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def _python(*code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["backends", "--help"]]
)
def test_start_up_does_not_load_torch(arguments: list[str]) -> None:
    done = _python(
        "import sys, deepinfer, deepinfer.cli",
        f"try: deepinfer.cli.main({arguments!r})",
        "except SystemExit as end: assert end.code == 0, end.code",
        "heavy = {'torch', 'numpy', 'pydantic', 'tokenizers'} & set(sys.modules)",
        "assert not heavy, heavy",
    )
    assert done.returncode == 0, done.stderr


def test_package_loads_its_exports_when_they_are_used() -> None:
    done = _python(
        "import sys, deepinfer",
        "assert 'EngineConfig' in dir(deepinfer) and 'pydantic' not in sys.modules",
        "from deepinfer import EngineConfig, SamplingParams",
        "assert 'torch' not in sys.modules",
        "try: deepinfer.nothing",
        "except AttributeError as error: assert 'nothing' in str(error)",
        "else: raise AssertionError",
    )
    assert done.returncode == 0, done.stderr


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(command.name in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_of_a_command_ends_with_an_example(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = {"batch": ["run"], "timeline": ["plot"], "backend": ["new"], "bench": ["replay"]}
    words = [command.name, *inner.get(command.name, [])]
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^examples?:\n(  .*\n)*  deepinfer {command.name} .*\s*\Z", shown, re.M)


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("deepinfer 0")


def test_misspelt_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["generat", "hello"])
    assert end.value.code == 2
    assert "did you mean generate?" in capsys.readouterr().err


def test_command_is_required() -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2


def test_exit_code_is_the_commands(install: Callable[[Run], None]) -> None:
    install(lambda args: 1)
    assert main(["work"]) == 1


def test_own_error_is_one_message_and_code_2(
    install: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(_raise(CapabilityError("no such op")))
    assert main(["work"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "deepinfer: no such op\n"
    assert captured.out == ""


def test_debug_lets_the_error_through(install: Callable[[Run], None]) -> None:
    install(_raise(CapabilityError("no such op")))
    with pytest.raises(CapabilityError):
        main(["--debug", "work"])


def test_error_of_another_kind_is_not_hidden(install: Callable[[Run], None]) -> None:
    install(_raise(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["work"])


def test_interrupt_is_code_130(install: Callable[[Run], None]) -> None:
    install(_raise(KeyboardInterrupt()))
    assert main(["work"]) == 130


def test_reader_that_went_away_is_no_traceback() -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'"{sys.executable}" -c "{_WRITE_MUCH}" | true; echo "${{PIPESTATUS[0]}}"',
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == str(EXIT_BROKEN_PIPE)
    assert done.stderr == ""


_WRITE_MUCH = """
import sys, types
from deepinfer.cli import main as program
module = types.ModuleType('much')
module.add_parser = lambda subparsers: subparsers.add_parser('much')
module.run = lambda args: sys.stdout.write('x' * 1000000) and 0
sys.modules['much'] = module
frame = sys.modules['deepinfer.cli.main']
frame.COMMANDS = (frame.Command('much', 'much', ''),)
sys.exit(program(['much']))
"""


def test_unreadable_log_level_is_refused_before_work(
    install: Callable[[Run], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(lambda args: 0)
    monkeypatch.setenv("DEEPINFER_LOG_LEVEL", "loud")
    assert main(["work"]) == 2
    assert "DEEPINFER_LOG_LEVEL = 'loud'" in capsys.readouterr().err
