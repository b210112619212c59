"""Committing a collected step: the only place where lengths, tokens and text move forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer.device.runtime import StepKind
from deepinfer.engine.outputs import FinishReason, TokenLogprob
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.step_state import (
    HostLogprobs,
    SamplerOutput,
    SchedulerOutputs,
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


@dataclass(slots=True)
class Committed:
    """What a commit did.

    Attributes:
        ended: sequences that ended, reason set.
        changed: requests that want to hear of every token and have news now; once for each answer.
        num_tokens: how many tokens came.
    """

    ended: list[Sequence] = field(default_factory=list)
    changed: list[Request] = field(default_factory=list)
    num_tokens: int = 0


class _HostResults:
    """A step's results as lists: reading a tensor number by number costs microseconds each.

    Attributes:
        width: tokens of a row.
        token_ids: of all rows, one after the other; a list for each row would keep the garbage
            collector busy.
        num_accepted: drafts accepted, by row.
        finite: as in the output; None where every number is, nearly always.
        logprobs: as in the output.
    """

    def __init__(self, output: SamplerOutput) -> None:
        self.width = output.token_ids.shape[1]
        self.token_ids: list[int] = output.token_ids.flatten().tolist()
        self.num_accepted: list[int] = output.num_accepted.tolist()
        self.finite: list[list[bool]] | None = (
            None if bool(output.finite.all()) else output.finite.tolist()
        )
        self.logprobs = output.logprobs
        self._draft_ids = output.draft_ids

    def draft_ids(self, row: int) -> list[int]:
        """Drafts that follow the newest token of a row; the host needs them for constraints."""
        drafts: list[int] = self._draft_ids[row].tolist()
        return drafts


def commit(
    state: WorkerStepState,
    output: SamplerOutput,
    rules: StopRules,
    publish: Callable[[Sequence], None] | None,
) -> Committed:
    """Apply a step's results to its sequences.

    Results of a sequence whose generation has changed since (preempted, ended) change nothing.

    Args:
        state: the step.
        output: its collected results.
        rules: what ends an answer.
        publish: called with every sequence whose committed length has moved; None: nobody is.

    Source: ZO-8.
    """
    committed = Committed()
    results = _HostResults(output)
    if state.scheduled.kind is StepKind.DECODE:
        _commit_decode(state.scheduled, results, rules, publish, committed)
    else:
        _commit_prefill(state.scheduled, results, output, rules, publish, committed)
    return committed


def _commit_decode(
    scheduled: SchedulerOutputs,
    results: _HostResults,
    rules: StopRules,
    publish: Callable[[Sequence], None] | None,
    committed: Committed,
) -> None:
    num_accepted = results.num_accepted
    for row, metadata in enumerate(scheduled.sequences):
        sequence = metadata.sequence
        if not metadata.is_current or sequence.finish_reason is not None:
            continue
        sequence.total_inflight_tokens -= metadata.query_len
        sequence.num_inflight_samples -= 1
        sequence.num_cached_tokens += 1 + num_accepted[row]  # the token fed and accepted drafts
        _commit_tokens(sequence, scheduled.step, results, row, rules, committed)
        if publish is not None:
            publish(sequence)  # after its tokens: accepted drafts are text of its blocks


def _commit_prefill(
    scheduled: SchedulerOutputs,
    results: _HostResults,
    output: SamplerOutput,
    rules: StopRules,
    publish: Callable[[Sequence], None] | None,
    committed: Committed,
) -> None:
    row = prompt_row = 0
    for metadata in scheduled.sequences:
        sequence = metadata.sequence
        num_scored = _num_scored(metadata) if metadata.scores_prompt else 0
        failed: tuple[Sequence, ...] = ()
        if metadata.is_current and sequence.finish_reason is None:
            sequence.total_inflight_tokens -= metadata.query_len
            sequence.num_inflight_samples -= metadata.samples
            sequence.num_cached_tokens += metadata.query_len
            if num_scored and output.prompt_logprobs is not None:
                failed = _commit_prompt(
                    metadata, scheduled.step, output.prompt_logprobs, prompt_row, num_scored
                )
            for spoilt in failed:
                committed.ended.append(spoilt)
                if publish is not None:
                    publish(spoilt)
            if not failed:
                if metadata.known_token >= 0:
                    _commit_known(sequence, scheduled.step, results, row, committed)
                elif metadata.samples:
                    _commit_tokens(sequence, scheduled.step, results, row, rules, committed)
                if publish is not None:
                    publish(sequence)
        prompt_row += num_scored
        row += metadata.samples


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


def _commit_known(
    sequence: Sequence, step: int, results: _HostResults, row: int, committed: Committed
) -> None:
    """Take the drafts after a token that was committed before a preemption."""
    if sequence.constraint is not None:
        sequence.draft_ids = results.draft_ids(row)
    if results.finite is not None and not results.finite[row][0]:
        _fail(sequence, step, f"output token {sequence.num_output_tokens - 1}")
        committed.ended.append(sequence)


def _commit_tokens(
    sequence: Sequence,
    step: int,
    results: _HostResults,
    row: int,
    rules: StopRules,
    committed: Committed,
) -> None:
    """Take the accepted drafts and the token after them; what follows an end is dropped."""
    request, constraint, logprobs = sequence.request, sequence.constraint, sequence.logprobs
    if not (request.changed or request.final_only):
        committed.changed.append(request)
    if constraint is not None:
        sequence.draft_ids = results.draft_ids(row)
    params, text, token_ids = request.params, sequence.text, sequence.token_ids
    first = row * results.width
    for entry in range(first, first + 1 + results.num_accepted[row]):
        if results.finite is not None and not results.finite[row][entry - first]:
            _fail(sequence, step, f"output token {sequence.num_output_tokens}")
            committed.ended.append(sequence)
            return
        token_id = results.token_ids[entry]
        token_ids.append(token_id)
        committed.num_tokens += 1
        if constraint is not None:
            constraint.advance(token_id)
        if logprobs is not None and results.logprobs is not None:
            num_top = params.logprobs or 0
            logprobs.append(_entry(results.logprobs, entry, token_id, num_top))
        if (
            token_id in rules.eos_token_ids
            or token_id in params.stop_token_ids
            or len(token_ids) >= sequence.max_len
            or text.awaits_stop
        ) and _ends(sequence, token_id, rules):
            committed.ended.append(sequence)
            return


def _fail(sequence: Sequence, step: int, place: str) -> None:
    sequence.finish_reason = FinishReason.ERROR
    sequence.error = (
        f"non-finite logits at step {step} for request {sequence.request.request_id}, answer "
        f"{sequence.index}, {place}; the tokens before it are kept"
    )


def _ends(sequence: Sequence, token_id: int, rules: StopRules) -> bool:
    """Whether the newest token ends its answer; the reason is set then."""
    params, text = sequence.request.params, sequence.text
    armed = not params.min_tokens or sequence.num_output_tokens >= params.min_tokens
    matched = text.push(token_id, armed=armed) if text.awaits_stop else None
    if matched is not None:
        sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, matched
    elif armed and rules.ends_answer(token_id, params):
        sequence.finish_reason = FinishReason.STOP
        if token_id not in rules.eos_token_ids or params.ignore_eos:
            sequence.stop_reason = token_id
    elif len(sequence.token_ids) >= sequence.max_len:
        sequence.finish_reason = FinishReason.LENGTH
    else:
        return False
    return True


def _entry(logprobs: HostLogprobs, row: int, token_id: int, num_top: int) -> TokenLogprob:
    ids = logprobs.top_ids[row, :num_top].tolist()
    values = logprobs.top_values[row, :num_top].tolist()
    return TokenLogprob(
        token_id,
        float(logprobs.chosen[row]),
        int(logprobs.rank[row]),
        tuple(zip(ids, values, strict=True)),
    )
