"""`deepinfer generate`: text for prompts given on the command line, in a file or on stdin."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.cli.options import (
    add_common_options,
    add_drafts_option,
    add_timeline_option,
    resolve_config,
)
from deepinfer.cli.prompts import read_prompts
from deepinfer.device.errors import RequestError

if TYPE_CHECKING:
    from deepinfer.api import LLM
    from deepinfer.engine.outputs import CompletionOutput, RequestOutput
    from deepinfer.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_EPILOG = """\
A file, and standard input when no prompt is given, hold one prompt a line; blank lines are
skipped. The text goes to standard output, everything else to standard error. Exit code: 0 every
prompt was answered, 1 some failed, 2 nothing could be done.

example:
  deepinfer generate "Once upon a time there was" --max-tokens 60 --temperature 0
"""
# Parameters with a flag of their own: name -> (type of the value, help).
_NUMBERS: dict[str, tuple[type[int] | type[float], str]] = {
    "max_tokens": (int, "the most tokens of an answer"),
    "min_tokens": (int, "the fewest tokens of an answer"),
    "temperature": (float, "0 takes the most likely token"),
    "top_p": (float, "share of probability that is kept"),
    "top_k": (int, "number of most likely tokens that are kept; 0 keeps all"),
    "min_p": (float, "least probability kept, relative to the most likely token"),
    "repetition_penalty": (float, "above 1 makes tokens of prompt and answer less likely"),
    "presence_penalty": (float, "lowers tokens that the answer holds already"),
    "frequency_penalty": (float, "lowers tokens by how often the answer holds them"),
    "seed": (int, "the same seed gives the same answer"),
    "n": (int, "number of answers to each prompt"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="answer prompts and show the text",
        description="Continue prompts and show the text as it comes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    parser.add_argument("--file", metavar="FILE", help="file of prompts; - is standard input")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show the text while it is made (the default for one answer to one prompt)",
    )
    sampling = parser.add_argument_group("sampling (defaults: `sampling` of the configuration)")
    for name, (kind, text) in _NUMBERS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends an answer; repeatable"
    )
    sampling.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="go on after the model's end token",
    )
    add_timeline_option(parser)
    add_drafts_option(parser)
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `generate`; returns the exit code.

    Raises:
        DeepInferError: the configuration, a prompt or a parameter is not valid.
    """
    config = resolve_config(args)
    prompts = read_prompts(args.prompts, args.file)

    from deepinfer.api import LLM
    from deepinfer.cli.speculation_line import show_speculation
    from deepinfer.cli.timeline_table import show_timeline
    from deepinfer.engine.sampling_params import SamplingParams

    params = SamplingParams(**config.sampling | _given_parameters(args))
    streams = _decide_to_stream(args.stream, num_prompts=len(prompts), n=params.n)
    with LLM(config, timeline_file=args.timeline) as llm:
        start_s = time.perf_counter()
        if streams:
            outputs = [_stream(llm, prompts[0], params)]
        else:
            outputs = llm.generate(prompts, params)
            _show(outputs)
        figures = _count(outputs, seconds=time.perf_counter() - start_s)
    _report(outputs, figures)
    figures |= show_speculation(llm.speculation, args.drafts_svg) | show_timeline(llm.timeline)
    if args.json is not None:
        from deepinfer.cli.report import write_json

        results = [output.to_json() for output in outputs]
        write_json(args.json, "generate", figures | {"results": results}, config=config)
    return 1 if figures["num_failed"] else 0


def _given_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that have a flag on this command line."""
    given = {name: getattr(args, name) for name in (*_NUMBERS, "stop", "ignore_eos")}
    return {name: value for name, value in given.items() if value is not None}


def _decide_to_stream(wanted: bool | None, *, num_prompts: int, n: int) -> bool:
    is_single = num_prompts == 1 and n == 1
    if wanted and not is_single:
        raise RequestError(
            f"--stream with {num_prompts} prompts and n={n}: only one answer to one prompt can be "
            "shown as it comes; leave --stream out, or give one prompt and n=1"
        )
    return is_single if wanted is None else wanted


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    """Show one answer piece by piece; returns its final state."""
    from deepinfer.cli.console import write_text

    num_shown = 0
    last: RequestOutput | None = None
    for last in llm.stream(prompt, params):
        for answer in last.outputs:
            write_text(answer.text[num_shown:])
            num_shown = len(answer.text)
    assert last is not None  # a stream ends with the finished output
    write_text("\n")
    return last


def _show(outputs: Sequence[RequestOutput]) -> None:
    """Show answers in the order of their prompts, under a heading when there are several."""
    from deepinfer.cli.console import write_text

    num_answers = sum(len(output.outputs) for output in outputs)
    for number, output in enumerate(outputs, start=1):
        for answer in output.outputs:
            if num_answers > 1:
                which = f"{number}.{answer.index + 1}" if len(output.outputs) > 1 else f"{number}"
                write_text(f"[{which}] {output.prompt}\n")
            write_text(answer.text + ("\n\n" if num_answers > 1 else "\n"))


def _count(outputs: Sequence[RequestOutput], *, seconds: float) -> dict[str, Any]:
    answers = [answer for output in outputs for answer in output.outputs]
    num_output_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "num_prompts": len(outputs),
        "num_failed": sum(_failure(output) is not None for output in outputs),
        "num_prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "num_output_tokens": num_output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": num_output_tokens / seconds if seconds > 0 else None,
    }


def _failure(output: RequestOutput) -> str | None:
    """Return why a request failed, None when all its answers are complete."""
    if output.error is not None:
        return output.error
    return next((_shortfall(answer) for answer in output.outputs if _shortfall(answer)), None)


def _shortfall(answer: CompletionOutput) -> str | None:
    if answer.finish_reason is not None and answer.finish_reason.is_answer:
        return None
    reason = "unfinished" if answer.finish_reason is None else answer.finish_reason.value
    return answer.error or f"the answer ended with {reason}"


def _report(outputs: Sequence[RequestOutput], figures: dict[str, Any]) -> None:
    """Say on standard error what failed, what marks the results bear, and how fast it went."""
    from deepinfer.cli.console import stderr_console

    for number, output in enumerate(outputs, start=1):
        failure = _failure(output)
        if failure is not None:
            logger.error("prompt %d failed: %s", number, failure)
    for mark in sorted({mark for output in outputs for mark in output.marks}):
        logger.warning("results are marked: %s", mark)
    speed = figures["output_tokens_per_s"]
    stderr_console().print(
        f"{figures['num_output_tokens']} tokens in {figures['seconds']:.2f} s"
        + ("" if speed is None else f", {speed:.1f} tokens/s"),
        style="dim",
        markup=False,
        highlight=False,
    )
