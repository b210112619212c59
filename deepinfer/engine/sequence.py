"""A request and the running state of its answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from deepinfer.cache.host_tier import StateName
from deepinfer.device.runtime import Event
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.outputs import FinishReason, TokenLogprob
from deepinfer.engine.prefix_hit import NO_HIT, PrefixHit
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.replay import ALL_ROWS, PrefillRows
from deepinfer.structured.constraint import Constraint


@dataclass(slots=True, eq=False)
class Request:
    """What a user asked.

    Attributes:
        request_id: unique among open requests.
        prompt: text, or None when token ids were given.
        prompt_token_ids: at least one token.
        params: checked against the model.
        controls: what they say about every sampled row.
        decoder_start: first prompt position that layers after the last KV source run; fixed here,
            whatever becomes of the request.
        seed: 64-bit seed; drawn at admission when the request names none.
        priority: lower runs first.
        arrival: order of arrival.
        deadline_s: monotonic time after which it ends with reason timeout, or None.
        sequences: one per answer.
        prompt_logprobs: filled while the first answer's prompt is computed.
        num_cached_tokens: prompt tokens that its first answer did not compute; None before it
            is admitted.
        took_approximate_blocks: one of its answers follows blocks that are marked as approximate.
        final_only: wants one result, when it has ended.
        changed: has news since its last RequestOutput, and is on the engine's list of those.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    controls: RequestControls
    seed: int
    priority: int
    arrival: int
    deadline_s: float | None
    sequences: list[Sequence] = field(default_factory=list)
    decoder_start: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int | None = None
    took_approximate_blocks: bool = False
    final_only: bool = False
    changed: bool = False

    @property
    def finished(self) -> bool:
        return None not in [sequence.finish_reason for sequence in self.sequences]


class SequenceStatus(enum.Enum):
    """WAITING holds no memory; RUNNING has a slot and blocks; FINISHED holds none again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making; compared and hashed by identity.

    Three numbers are kept and the rest follows from them: tokens known, tokens whose KV is
    committed, tokens launched and not committed. With drafts the last one is an upper bound.

    Attributes:
        request: its request.
        index: which of the request's answers.
        token_ids: prompt and committed output.
        text: detokenisation and stop strings of the output.
        max_len: most tokens it may reach, prompt included.
        constraint: structured output, or None.
        status: where it stands.
        rows: which rows of its prefill each layer runs; set at admission.
        num_cached_tokens: positions whose KV is committed.
        total_inflight_tokens: positions launched and not committed (ZO-3).
        prefill_target: positions to compute before it decodes; set at admission. All it has but
            the newest token where an answer with drafts is computed anew, see `Scheduler`.
        resumed_at: tokens of its answer when it was admitted last.
        hit: what it took over at admission, without the states that were loaded.
        block_names: names of its full blocks, as far as anybody asked.
        num_published_blocks: its first blocks, whose text is known to the prefix cache.
        loads: copies from host memory that it waits for.
        window_stops: positions at which its prefill pauses, so that its windows can be saved.
        window_name: windows of its answer that were saved last, or None.
        num_inflight_samples: steps launched and not committed that yield a token at least.
        generation: rises with every preemption; results of an older one are ignored (ZO-8).
        last_step: the last step it was scheduled in, -1 for none; its memory is the device's
            until then.
        blocks: KV blocks held.
        has_new_blocks: whether they, or the slot, are others than when its last step was built.
        slot: persistent slot, or None.
        logprobs: one entry per output token, if asked for.
        finish_reason: set once.
        stop_reason: stop string or token id that ended it.
        error: what went wrong, with finish reason error.
        draft_ids: drafts that follow its newest token, as far as the host knows; -1 none. Of
            constrained answers only.
    """

    request: Request
    index: int
    token_ids: list[int]
    text: OutputText
    max_len: int
    constraint: Constraint | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    rows: PrefillRows = ALL_ROWS
    num_cached_tokens: int = 0
    total_inflight_tokens: int = 0
    prefill_target: int = 0
    resumed_at: int = 0
    hit: PrefixHit = NO_HIT
    block_names: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    loads: list[Event] = field(default_factory=list)
    window_stops: list[int] = field(default_factory=list)
    window_name: StateName | None = None
    num_inflight_samples: int = 0
    generation: int = 0
    last_step: int = -1
    blocks: list[int] = field(default_factory=list)
    has_new_blocks: bool = True
    slot: int | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    draft_ids: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_launched_tokens(self) -> int:
        """Positions computed or being computed, at most."""
        return self.num_cached_tokens + self.total_inflight_tokens

    @property
    def least_len(self) -> int:
        """Tokens it will have, at least, when everything in flight is committed."""
        num_tokens = len(self.token_ids)
        if self.num_cached_tokens < self.prefill_target < num_tokens:
            # The first sample in flight, if any, yields its newest token once more.
            return max(num_tokens, self.prefill_target + self.num_inflight_samples)
        return num_tokens + self.num_inflight_samples

    @property
    def decodes_next(self) -> bool:
        """Whether its prefill is launched, and something may follow what is in flight."""
        if self.num_cached_tokens < self.prefill_target:
            return not self.needs_prefill and self.least_len < self.max_len
        # Nearly always, and so without further properties; `least_len` says the same.
        return len(self.token_ids) + self.num_inflight_samples < self.max_len

    def add_blocks(self, blocks: list[int]) -> None:
        """Hold further blocks."""
        self.blocks += blocks
        self.has_new_blocks = True

    def replace_block(self, number: int, block: int) -> None:
        """Hold another block of the same content in a block's place."""
        self.blocks[number] = block
        self.has_new_blocks = True

    def draft_floor(self, num_layers: int) -> int:
        """First position whose rows have left the last layer: a drafter's context begins there.

        Rows before loaded windows left it in the run that saved them, unless that was not to run
        its later layers there.
        """
        if self.rows is ALL_ROWS:
            return 0  # nearly always
        if self.hit.has_window and self.request.decoder_start == 0:
            return 0
        return self.rows.limits(num_layers)[0]

    @property
    def is_loading(self) -> bool:
        """Whether it waits for a copy; it may run all the same, and then the device waits."""
        return not all(load.query() for load in self.loads)

    @property
    def needs_prefill(self) -> bool:
        return self.num_launched_tokens < self.prefill_target

    @property
    def scores_prompt(self) -> bool:
        """Whether it computes prompt logprobs that the request still lacks."""
        request = self.request
        return (
            self.index == 0
            and request.params.prompt_logprobs is not None
            and request.prompt_logprobs is not None
            and len(request.prompt_logprobs) < len(request.prompt_token_ids)
        )

    def begin(self, hit: PrefixHit) -> None:
        """Start with what was taken over; blocks, slot and target are set by the caller."""
        self.hit, self.num_published_blocks = hit, len(hit.blocks) + len(hit.saved)
        self.rows, self.num_cached_tokens = hit.rows, hit.rows.first
        if self.index == 0 and self.request.num_cached_tokens is None:
            # Later admissions find what the request itself has left.
            self.request.num_cached_tokens = hit.rows.first

    def lose_memory(self) -> None:
        """Forget slot and blocks, and everything that was computed into them."""
        self.slot, self.blocks, self.hit = None, [], NO_HIT
        self.has_new_blocks = True
        self.loads, self.window_stops, self.draft_ids = [], [], []
        self.num_cached_tokens = self.total_inflight_tokens = 0
        self.num_inflight_samples = self.num_published_blocks = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Who runs first: priority, then arrival, then answer."""
        return (self.request.priority, self.request.arrival, self.index)
