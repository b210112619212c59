"""Steps on the null device: no math, scripted tokens, real addressing.

What a device does with a step's numbers is done here in plain Python: it follows the remap,
corrects lengths, reads every earlier row through the block table and writes its own, all at the
virtual time at which the work ends. So a scheduler that hands out memory too early, forgets a
correction or mixes up generations fails here, in microseconds and without a model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from deepinfer.config import EngineConfig
from deepinfer.device.errors import ConfigError, ContractError
from deepinfer.device.null import NullRuntime, TokenScript
from deepinfer.device.ops.state import NEWCOMER
from deepinfer.device.runtime import StepKind
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.null_memory import NullMemory, Owner, Place
from deepinfer.engine.null_state_copies import NullStateCopies
from deepinfer.engine.prefix_hit import PrefixHit
from deepinfer.engine.state_copies import save_windows
from deepinfer.engine.step_runner import PreSamplerSync
from deepinfer.engine.step_state import (
    DeviceWork,
    SamplerOutput,
    SchedulerOutputs,
    SequenceMetadata,
    WorkerStepState,
)

# Written at the positions of refused drafts; no script has it.
_REFUSED_DRAFT = -2


@dataclass(frozen=True, slots=True)
class _Result:
    """What a step leaves on the device for the next one."""

    owner: Owner
    context_len: int
    token_ids: tuple[int, ...]


class NullStepRunner:
    """A step runner whose tokens come from a script.

    The script decides everything: sampling parameters have no effect, and log probabilities are
    refused. `TokenScript.accepted` is asked with the index of the output token that is fed.
    """

    def __init__(
        self,
        runtime: NullRuntime,
        script: TokenScript,
        config: EngineConfig,
        *,
        max_drafts: int = 0,
        window: int = 1,
        replay_len: int = 1,
        checks_memory: bool = True,
    ) -> None:
        """An idle device.

        Args:
            runtime: time and costs; its `poisons_released` decides whether releases poison.
            script: tokens and accepted drafts.
            config: `cache.num_blocks` must be given.
            max_drafts: drafts verified with each token.
            window: tokens of the sliding window; 1 has no past to rebuild.
            replay_len: rows before a prefix hit's end that rebuild the windows.
            checks_memory: simulate every row; its cost grows with the square of the lengths.
        Raises:
            ConfigError: the configuration does not say how many blocks there are.
        """
        if config.cache.num_blocks is None:
            raise ConfigError(
                "cache.num_blocks is null, but the null device has no memory to size it from; "
                "set a number of blocks"
            )
        self._runtime, self._script = runtime, script
        self._num_blocks, self.max_drafts = config.cache.num_blocks, max_drafts
        self._memory = (
            NullMemory(
                config.cache.block_size,
                window=window,
                replay_len=replay_len,
                poisons=runtime.poisons_released,
            )
            if checks_memory
            else None
        )
        self.copies = NullStateCopies(self._memory, runtime)
        self._results: dict[int, _Result] = {}

    @property
    def num_blocks(self) -> int:
        """KV blocks there are."""
        return self._num_blocks

    def launch(
        self,
        scheduled: SchedulerOutputs,
        built: BuiltStep,
        pre_sampler_sync: PreSamplerSync,
        *,
        timed: bool = False,
    ) -> WorkerStepState:
        """Issue a step; its forward takes what the runtime's costs say, its sampling nothing.

        Raises:
            ContractError: log probabilities are asked for.
        """
        stream = self._runtime.compute_stream
        results: list[_Result] = []
        # As they are now; a sequence may have lost its memory when the work runs.
        hits = [metadata.sequence.hit for metadata in scheduled.sequences]
        begun = stream.record_event()
        with self._runtime.step(scheduled.kind, scheduled.num_rows):
            stream.enqueue(lambda: results.extend(self._forward(scheduled, built, hits)))
        forwarded = stream.record_event()
        sampling = pre_sampler_sync()
        if sampling.num_top is not None or built.prompt_targets:
            raise ContractError(
                "the null device makes no logits; ask for neither logprobs nor prompt_logprobs"
            )
        output = self._allocate(built.num_samples)
        stream.enqueue(lambda: self._sample(results, built, output))
        saved = save_windows(scheduled, self.copies)
        # Sampling takes no time here, so the forward is all of the device's work.
        work = (DeviceWork("forward", begun, forwarded),) if timed else ()
        return WorkerStepState(scheduled, output, forwarded, stream.record_event(), saved, work)

    def collect(self, state: WorkerStepState) -> SamplerOutput:
        """Wait for a step's results; raises what its work raised."""
        state.sampled.synchronize()
        return state.sampler_output

    def start_penalties(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """Nothing: the script decides."""

    def release(self, slot: int | None, blocks: Collection[int]) -> None:
        """Poison at once, so that a step that has not run yet would read it."""
        if self._memory is not None and self._runtime.poisons_released:
            self._memory.poison(slot, blocks)

    def drain(self) -> None:
        """Wait for everything issued, also for a step whose launch failed half-way."""
        self._runtime.compute_stream.synchronize()

    def close(self) -> None:
        """Let the work end."""
        self._runtime.close()

    def _allocate(self, count: int) -> SamplerOutput:
        width = 1 + self.max_drafts
        return SamplerOutput(
            token_ids=torch.full((count, width), _REFUSED_DRAFT, dtype=torch.int64),
            num_accepted=torch.full((count,), self.max_drafts, dtype=torch.int64),
            num_verified=torch.zeros(count, dtype=torch.int64),
            finite=torch.ones((count, width), dtype=torch.bool),
            draft_ids=torch.full((count, self.max_drafts), _REFUSED_DRAFT, dtype=torch.int64),
            survival=torch.ones((count, self.max_drafts)),
            logprobs=None,
            prompt_logprobs=None,
        )

    def _forward(
        self, scheduled: SchedulerOutputs, built: BuiltStep, hits: Sequence[PrefixHit]
    ) -> list[_Result]:
        """Results of the sequences that sample, in their order."""
        batch = built.batch
        input_ids, tables = batch.input_ids.tolist(), batch.block_table.tolist()
        contexts, limits = batch.context_lens.tolist(), built.limits.tolist()
        results: list[_Result] = []
        first_row, decodes = 0, scheduled.kind is StepKind.DECODE
        for index, source in enumerate(built.remap.tolist()):
            metadata = scheduled.sequences[index]
            # A decode step gives first tokens only, one for each sequence.
            num_given = 1 if decodes else metadata.query_len
            fed = input_ids[first_row : first_row + num_given]
            first_row += num_given
            context, query_len = contexts[index], metadata.query_len
            if source != NEWCOMER:
                before = self._result(source, metadata)
                context, fed = before.context_len, [before.token_ids[-1]]
            if decodes:
                query_len = max(0, min(query_len, limits[index] - context))
                result = self._verify(metadata, context, query_len)
                fed = [*fed[:1], *result.token_ids[:-1]]
                fed += [_REFUSED_DRAFT] * (query_len - len(fed))
            else:
                result = self._verify(metadata, context + query_len - 1, 1)
            if self._memory is not None:
                rows, has_window = hits[index].rows, hits[index].has_window
                floor = 0 if has_window else rows.first
                place = Place(metadata.slot, tables[index], floor, rows.write_from)
                self._touch(metadata, place, context, fed[:query_len])
            if metadata.samples:
                results.append(result)
        return results

    def _result(self, row: int, metadata: SequenceMetadata) -> _Result:
        found = self._results.get(row)
        if found is None or found.owner != _owner(metadata):
            raise ContractError(
                f"remap of {_owner(metadata)} names result row {row}, which holds "
                f"{'nothing' if found is None else found.owner}"
            )
        return found

    def _verify(self, metadata: SequenceMetadata, context: int, query_len: int) -> _Result:
        """What the script makes of a token fed at position `context` with its drafts."""
        request = metadata.sequence.request
        owner, index = _owner(metadata), context + 1 - len(request.prompt_token_ids)
        if query_len == 0 or index < 0:
            # Past its end, or inside its prompt: nobody takes this result.
            return _Result(owner, context, ())
        accepted = 0
        if query_len > 1:
            accepted = min(self._script.accepted(request.request_id, index), query_len - 1)
        tokens = tuple(
            self._script.token(request.request_id, index + offset) for offset in range(accepted + 1)
        )
        return _Result(owner, context + 1 + accepted, tokens)

    def _touch(
        self, metadata: SequenceMetadata, place: Place, context: int, fed: list[int]
    ) -> None:
        assert self._memory is not None  # the caller asked
        request, owner = metadata.sequence.request, _owner(metadata)
        num_outputs = max(0, context - len(request.prompt_token_ids))
        outputs = [self._script.token(request.request_id, index) for index in range(num_outputs)]
        past = (request.prompt_token_ids + outputs)[:context]
        self._memory.read(owner, place, past)
        self._memory.write(owner, place, past, fed)

    def _sample(self, results: list[_Result], built: BuiltStep, output: SamplerOutput) -> None:
        for row, (place, result) in enumerate(
            zip(built.result_rows.tolist(), results, strict=True)
        ):
            if not result.token_ids:
                # As the ring of a real device: a sequence past its end stays where it was.
                result = _Result(result.owner, result.context_len, (_REFUSED_DRAFT,))
            self._results[place] = result
            if built.batch.kind is StepKind.DECODE:
                output.num_verified[row] = int(built.batch.query_lens[row]) - 1
            output.num_accepted[row] = len(result.token_ids) - 1
            output.token_ids[row, : len(result.token_ids)] = torch.tensor(result.token_ids)


def _owner(metadata: SequenceMetadata) -> Owner:
    sequence = metadata.sequence
    return Owner(sequence.request.request_id, sequence.index, metadata.generation)
