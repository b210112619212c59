"""Committing a collected step: the only place where lengths, tokens and text move forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.device.runtime import StepKind
from deepinfer.engine.outputs import FinishReason, TokenLogprob
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.step_state import (
    HostLogprobs,
    SamplerOutput,
    SequenceMetadata,
    WorkerStepState,
)


@dataclass(frozen=True, slots=True)
class StopRules:
    """Tokens that mean something to every request of a model.

    Attributes:
        eos_token_ids: end an answer.
        never_token_ids: no row may output them, such as placeholders of other inputs.
    """

    eos_token_ids: frozenset[int]
    never_token_ids: tuple[int, ...] = ()

    def ends_answer(self, token_id: int, params: SamplingParams) -> bool:
        """Whether a token ends an answer that is long enough."""
        is_end = token_id in self.eos_token_ids and not params.ignore_eos
        return is_end or token_id in params.stop_token_ids


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did: the sequences that ended, reason set, and how many tokens came."""

    ended: list[Sequence]
    num_tokens: int


class _HostResults:
    """A step's results as lists: reading a tensor number by number costs microseconds each."""

    def __init__(self, output: SamplerOutput) -> None:
        self.token_ids: list[list[int]] = output.token_ids.tolist()
        self.num_accepted: list[int] = output.num_accepted.tolist()
        # Nearly always everything is; None then.
        self.finite: list[list[bool]] | None = (
            None if bool(output.finite.all()) else output.finite.tolist()
        )
        self.draft_ids: list[list[int]] | None = (
            output.draft_ids.tolist() if output.draft_ids.shape[1] else None
        )
        self.logprobs = output.logprobs

    def num_kept(self, kind: StepKind, metadata: SequenceMetadata, row: int) -> int:
        """Positions whose KV stays: a whole chunk, or a token and its accepted drafts."""
        return 1 + self.num_accepted[row] if kind is StepKind.DECODE else metadata.query_len


def commit(
    state: WorkerStepState,
    output: SamplerOutput,
    rules: StopRules,
    publish: Callable[[Sequence], None],
) -> Committed:
    """Apply a step's results to its sequences.

    Results of a sequence whose generation has changed since (preempted, ended) change nothing.

    Args:
        state: the step.
        output: its collected results.
        rules: what ends an answer.
        publish: called with every sequence whose committed length has moved.

    Source: ZO-8.
    """
    ended: list[Sequence] = []
    row = prompt_row = num_tokens = 0
    kind, step = state.scheduled.kind, state.scheduled.step
    results = _HostResults(output)
    for metadata in state.scheduled.sequences:
        sequence = metadata.sequence
        num_scored = _num_scored(metadata) if metadata.scores_prompt else 0
        current = metadata.is_current and sequence.finish_reason is None
        failed: tuple[Sequence, ...] = ()
        if current:
            sequence.total_inflight_tokens -= metadata.query_len
            sequence.num_inflight_samples -= metadata.samples
            sequence.num_cached_tokens += results.num_kept(kind, metadata, row)
            if num_scored and output.prompt_logprobs is not None:
                failed = _commit_prompt(
                    metadata, step, output.prompt_logprobs, prompt_row, num_scored
                )
        prompt_row += num_scored
        for spoilt in failed:
            ended.append(spoilt)
            publish(spoilt)
        if current and metadata.samples and not failed:
            num_before = len(sequence.token_ids)
            if metadata.known_token >= 0:
                _commit_known(sequence, step, results, row)
            else:
                _commit_tokens(sequence, step, results, row, rules)
            num_tokens += len(sequence.token_ids) - num_before
            if sequence.finish_reason is not None:
                ended.append(sequence)
        if current and not failed:
            publish(sequence)  # after its tokens: accepted drafts are text of its blocks
        row += metadata.samples
    return Committed(ended, num_tokens)


def _num_scored(metadata: SequenceMetadata) -> int:
    last = metadata.sequence.num_prompt_tokens - 1
    stop = metadata.context_len + metadata.query_len
    return max(0, min(stop, last) - metadata.context_len)


def _commit_prompt(
    metadata: SequenceMetadata, step: int, logprobs: HostLogprobs, first: int, count: int
) -> tuple[Sequence, ...]:
    """Take the prompt's log probabilities; the answers that end because one is no number.

    All that are open: what they share cannot be had.
    """
    request = metadata.sequence.request
    entries = request.prompt_logprobs
    assert entries is not None  # scores_prompt implies it
    for offset in range(count):
        position = metadata.context_len + offset + 1
        if position < len(entries):
            continue  # committed before a preemption, and computed once more
        token_id = request.prompt_token_ids[position]
        num_top = request.params.prompt_logprobs or 0
        entry = _entry(logprobs, first + offset, token_id, num_top)
        # An impossible token has minus infinity; a row of NaN has no log probabilities at all.
        if math.isnan(entry.logprob) or entry.logprob == math.inf:
            open_answers = tuple(s for s in request.sequences if s.finish_reason is None)
            for answer in open_answers:
                _fail(answer, step, f"prompt token {position}")
            return open_answers
        entries.append(entry)
    return ()


def _commit_known(sequence: Sequence, step: int, results: _HostResults, row: int) -> None:
    """Take the drafts after a token that was committed before a preemption."""
    if results.draft_ids is not None:
        sequence.draft_ids = results.draft_ids[row]
    if results.finite is not None and not results.finite[row][0]:
        _fail(sequence, step, f"output token {sequence.num_output_tokens - 1}")


def _commit_tokens(
    sequence: Sequence, step: int, results: _HostResults, row: int, rules: StopRules
) -> None:
    """Take the accepted drafts and the token after them; what follows an end is dropped."""
    request = sequence.request
    request.changed = True
    if results.draft_ids is not None:
        sequence.draft_ids = results.draft_ids[row]
    token_ids = results.token_ids[row]
    first_entry = row * len(token_ids)
    for offset in range(1 + results.num_accepted[row]):
        if results.finite is not None and not results.finite[row][offset]:
            _fail(sequence, step, f"output token {sequence.num_output_tokens}")
            return
        token_id = token_ids[offset]
        sequence.token_ids.append(token_id)
        if sequence.constraint is not None:
            sequence.constraint.advance(token_id)
        if sequence.logprobs is not None and results.logprobs is not None:
            num_top = request.params.logprobs or 0
            entry = _entry(results.logprobs, first_entry + offset, token_id, num_top)
            sequence.logprobs.append(entry)
        _check_end(sequence, token_id, rules)
        if sequence.finish_reason is not None:
            return


def _fail(sequence: Sequence, step: int, place: str) -> None:
    sequence.finish_reason = FinishReason.ERROR
    sequence.error = (
        f"non-finite logits at step {step} for request {sequence.request.request_id}, answer "
        f"{sequence.index}, {place}; the tokens before it are kept"
    )


def _check_end(sequence: Sequence, token_id: int, rules: StopRules) -> None:
    params = sequence.request.params
    armed = not params.min_tokens or sequence.num_output_tokens >= params.min_tokens
    matched = sequence.text.push(token_id, armed=armed)
    if matched is not None:
        sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, matched
    elif armed and rules.ends_answer(token_id, params):
        sequence.finish_reason = FinishReason.STOP
        if token_id not in rules.eos_token_ids or params.ignore_eos:
            sequence.stop_reason = token_id
    elif len(sequence.token_ids) >= sequence.max_len:
        sequence.finish_reason = FinishReason.LENGTH


def _entry(logprobs: HostLogprobs, row: int, token_id: int, num_top: int) -> TokenLogprob:
    ids = logprobs.top_ids[row, :num_top].tolist()
    values = logprobs.top_values[row, :num_top].tolist()
    return TokenLogprob(
        token_id,
        float(logprobs.chosen[row]),
        int(logprobs.rank[row]),
        tuple(zip(ids, values, strict=True)),
    )
