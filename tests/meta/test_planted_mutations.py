"""The suite can fail: every planted mistake is caught by a case of its own op, and located.

A mutant is the reference with one op changed in its arguments or its result. Where it changes
what the model computes, the suite has to name the op when both backends run a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec, OpTable
from deepinfer.device.ops import (
    attention,
    compress,
    engram,
    indexer,
    kv,
    load_all,
    mhc,
    moe,
    norm,
    quant,
    sampling,
    spec,
    state,
)
from deepinfer.device.ops.mhc import MhcBoundary, MhcMix
from deepinfer.device.ops.moe import Routing
from deepinfer.device.ops.sampling import LogitControls, Logprobs, SampleParams
from deepinfer.device.ops.spec import DraftPlan, Verified
from deepinfer.device.ops.state import NEWCOMER, StepResults
from deepinfer.device.runtime import StepKind
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.cases import op_cases
from deepinfer_conformance.locate import locate
from deepinfer_conformance.run import run_case
from deepinfer_reference.backend import ReferenceBackend

SEQUENCE = [(7 * i + 3) % 3800 + 10 for i in range(72)]
Function = Callable[..., Any]
Mutation = Callable[[Function], Function]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted mistake."""

    spec: OpSpec[..., Any]
    name: str
    mutate: Mutation


def _bound(spec: OpSpec[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(spec.signature.bind(*args, **kwargs).arguments)


def _with(spec: OpSpec[..., Any], name: str, **changes: Callable[[Any], Any]) -> Mutant:
    """The op called with changed arguments; a change is a function of the right argument."""

    def mutate(function: Function) -> Function:
        @functools.wraps(function)
        def wrong(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            bound = _bound(spec, args, kwargs)
            return function(**{**bound, **{k: f(bound[k]) for k, f in changes.items()}})

        return wrong

    return Mutant(spec, name, mutate)


def _after(spec: OpSpec[..., Any], name: str, change: Callable[[Any], Any]) -> Mutant:
    """The op with its result changed."""

    def mutate(function: Function) -> Function:
        @functools.wraps(function)
        def wrong(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return change(function(*args, **kwargs))

        return wrong

    return Mutant(spec, name, mutate)


def _shift_columns(x: Tensor) -> Tensor:
    return torch.roll(x, 1, -1)


def _swap_nibbles(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    data, scale = result
    return (data >> 4) | (data << 4), scale


def _shift_slots(slots: Tensor) -> Tensor:
    return torch.where(slots > 0, slots - 1, slots)


def _drop_last(slots: Tensor) -> Tensor:
    changed = slots.clone()
    changed[:, -1:] = -1
    return changed


def _swap_gates(rows: Tensor) -> Tensor:
    width = rows.shape[1] // 2
    return torch.cat((rows[:, width:], rows[:, :width]), dim=1)


def _none_written(slots: Tensor) -> Tensor:
    return torch.full_like(slots, -1)


def _without_last_output(out: Tensor) -> Tensor:
    return torch.cat((out[:, :-1], torch.zeros_like(out[:, -1:])), dim=1)


def _transposed(mix: MhcMix) -> MhcMix:
    return mix._replace(comb=mix.comb.transpose(1, 2))


def _renormalised(routing: Routing) -> Routing:
    return routing._replace(weights=routing.weights / 1.5)


def _next_expert(routing: Routing) -> Routing:
    return routing._replace(ids=(routing.ids + 1) % 6)


def _none_accepted(results: StepResults) -> StepResults:
    return results._replace(num_accepted=torch.zeros_like(results.num_accepted))


def _last_key_hidden(plan: DraftPlan) -> DraftPlan:
    return plan._replace(read=_drop_last(plan.read))


def _unnormed_ratio(spec: OpSpec[..., Any]) -> Mutant:
    return _with(spec, "eps-wrong", eps=lambda eps: eps + 1e-3)


def _boundary(name: str, change: Callable[[Function, dict[str, Any]], MhcBoundary]) -> Mutant:
    """A boundary that gets all its arguments by name."""

    def mutate(function: Function) -> Function:
        def mhc_boundary(*args: Any, **kwargs: Any) -> MhcBoundary:  # noqa: ANN401
            return change(function, _bound(mhc.mhc_boundary, args, kwargs))

        mhc_boundary.__signature__ = mhc.mhc_boundary.signature  # type: ignore[attr-defined]
        return mhc_boundary

    return Mutant(mhc.mhc_boundary, name, mutate)


def _own_pre(function: Function, bound: dict[str, Any]) -> MhcBoundary:
    """Collapses with the pre it has just computed, which belongs to the sublayer after next."""
    right: MhcBoundary = function(**bound)
    moved = bound["mix"]._replace(pre=right.mix.pre)
    wrong: MhcBoundary = function(**{**bound, "mix": moved})
    return right._replace(x=wrong.x)


def _post_of_the_next(function: Function, bound: dict[str, Any]) -> MhcBoundary:
    """Expands with the mixing of the next sublayer."""
    right: MhcBoundary = function(**bound)
    wrong: MhcBoundary = function(**{**bound, "mix": right.mix._replace(pre=bound["mix"].pre)})
    return wrong


def _without_candidates(function: Function) -> Function:
    """The second level of the selection left out: a layer searches everything."""

    def index_select(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        bound = _bound(indexer.index_select, args, kwargs)
        return function(**{**bound, "candidates": None})

    index_select.__signature__ = indexer.index_select.signature  # type: ignore[attr-defined]
    return index_select


def _next_position(params: SampleParams) -> SampleParams:
    return params._replace(positions=params.positions + 1)


def _no_seed(params: SampleParams) -> SampleParams:
    return params._replace(seeds=torch.zeros_like(params.seeds))


def _one_more(params: SampleParams) -> SampleParams:
    return params._replace(top_k=torch.where(params.top_k > 0, params.top_k + 1, 0))


def _no_min_p(params: SampleParams) -> SampleParams:
    return params._replace(min_p=torch.zeros_like(params.min_p))


def _nothing_pending(controls: LogitControls) -> LogitControls:
    penalties = controls.penalties
    if penalties is None:
        return controls
    none = torch.full_like(penalties.pending, -1)
    return controls._replace(penalties=penalties._replace(pending=none))


def _cooled(logits: Tensor | None) -> Tensor | None:
    """As if the drafter had drawn at another temperature than the request's."""
    return None if logits is None else logits * 1.2


def _one_more_accepted(found: Verified) -> Verified:
    width = found.token_ids.shape[1]
    return found._replace(num_accepted=(found.num_accepted + 1).clamp_max(width - 1))


def _bias_twice(controls: LogitControls) -> LogitControls:
    bias = controls.bias
    return (
        controls if bias is None else controls._replace(bias=bias._replace(values=2 * bias.values))
    )


def _rank_from_zero(found: Logprobs) -> Logprobs:
    return found._replace(rank=found.rank - 1)


def _away_from_zero(x: Tensor) -> Tensor:
    """A little larger in magnitude: ties round up instead of to even."""
    return x.float() * (1.0 + 2.0**-20)


MUTANTS: tuple[Mutant, ...] = (
    _with(attention.rope, "position-off-by-one", positions=lambda p: (p - 1).clamp_min(0)),
    _with(attention.rope, "inverse-ignored", inverse=lambda inverse: False),
    _with(attention.sparse_attention, "sink-missing", sink=lambda s: torch.full_like(s, -1e4)),
    _with(attention.sparse_attention, "scale-wrong", scale=lambda scale: scale * 1.1),
    _with(attention.sparse_attention, "window-one-short", window_slots=_drop_last),
    _with(attention.sparse_attention, "stale-slots", window_slots=_shift_slots),
    _after(attention.sparse_attention, "rows-rolled", lambda out: out.roll(1, 0)),
    _with(compress.compress_pair, "gate-and-value-swapped", values_gates=_swap_gates),
    _with(compress.compress_pair, "pair-misaligned", emit_rows=_shift_slots),
    _with(compress.compress_pair, "pending-row-not-kept", ring_write=_none_written),
    _with(engram.ngram_hash, "pad-wrong", constants=lambda c: c._replace(pad=c.pad + 1)),
    _with(engram.ngram_hash, "prime-wrong", constants=lambda c: c._replace(primes=c.primes - 2)),
    _with(engram.ngram_hash, "history-forgotten", history=lambda h: torch.full_like(h, -1)),
    _with(engram.engram_fetch_start, "row-off-by-one", rows=_shift_slots),
    _with(engram.engram_inject, "dead-ignored", dead=lambda dead: None),
    _unnormed_ratio(engram.engram_inject),
    _with(indexer.index_query, "not-rotated", positions=torch.zeros_like),
    _with(indexer.index_scores, "newest-hidden", visible=lambda v: (v - 1).clamp_min(0)),
    _with(indexer.index_scores, "weights-absolute", head_weights=torch.abs),
    _with(indexer.index_scores, "next-block", block_table=lambda t: t.roll(1, 1)),
    _with(indexer.select_topk, "worst-chosen", scores=lambda s: torch.where(s > -torch.inf, -s, s)),
    _after(indexer.select_topk, "last-lost", _drop_last),
    _with(indexer.select_candidates, "newest-not-kept", visible=torch.zeros_like),
    _with(indexer.mask_candidates, "block-size-wrong", block_size=lambda size: size - 1),
    _after(indexer.select_visible, "off-by-one", lambda out: torch.where(out >= 0, out + 1, -1)),
    _with(kv.rope_store, "position-off-by-one", positions=lambda p: (p - 1).clamp_min(0)),
    _with(kv.rope_store, "slot-aliased", slots=lambda s: torch.where(s > 0, s - 1, s)),
    _with(kv.rope_store, "value-scaled", x=lambda x: x * 1.1),
    _with(kv.copy_rows, "row-off-by-one", source_slots=_shift_slots),
    _with(kv.entry_slots, "block-size-wrong", entries_per_block=lambda size: size + 1),
    _with(mhc.mhc_mix, "one-iteration-missing", num_iters=lambda n: max(1, n - 1)),
    _with(mhc.mhc_mix, "eps-ignored", hc_eps=lambda eps: 0.0),
    _after(mhc.mhc_mix, "comb-transposed", _transposed),
    _with(mhc.mhc_collapse, "streams-swapped", pre=_shift_columns),
    _with(mhc.mhc_collapse_norm, "streams-swapped", pre=_shift_columns),
    _with(mhc.mhc_expand, "comb-transposed", comb=lambda c: c.transpose(1, 2)),
    _boundary("own-pre", _own_pre),
    _boundary("next-mixing", _post_of_the_next),
    Mutant(indexer.index_select, "candidates-ignored", _without_candidates),
    _with(attention.rope, "cos-and-sin-swapped", rope_table=_swap_gates),
    _with(moe.moe_gate, "scale-twice", route_scale=lambda scale: scale * scale),
    _with(moe.moe_gate, "bias-ignored", bias=torch.zeros_like),
    _after(moe.moe_gate, "route-scale-dropped", _renormalised),
    _with(moe.moe_dispatch, "experts-swapped", routing=_next_expert),
    _with(moe.moe_dispatch, "padding-sent", valid=torch.ones_like),
    _with(moe.moe_experts, "limit-ignored", swiglu_limit=lambda limit: 1e9),
    _with(moe.moe_combine, "shared-dropped", shared=torch.zeros_like),
    _with(moe.swiglu, "halves-swapped", gate_up=_swap_gates),
    _unnormed_ratio(norm.rmsnorm),
    _with(norm.rmsnorm, "weight-ignored", weight=torch.ones_like),
    _with(quant.embed, "id-off-by-one", ids=_shift_slots),
    _after(quant.linear, "scale-twice", lambda out: out * 2.0),
    _after(quant.linear, "last-output-lost", _without_last_output),
    _with(quant.linear_f32, "input-rounded", x=lambda x: x.half()),
    _with(quant.grouped_linear, "groups-swapped", x=lambda x: x.roll(1, 1)),
    _after(quant.quantize_q4_ue8m0, "nibbles-swapped", _swap_nibbles),
    _after(quant.quantize_q4_e4m3, "nibbles-swapped", _swap_nibbles),
    _with(quant.quantize_q4_ue8m0, "ties-away-from-zero", x=_away_from_zero),
    _with(quant.quantize_a8, "input-rounded-up", x=lambda x: x * 1.01),
    _with(sampling.sample_tokens, "next-position", params=_next_position),
    _with(sampling.sample_tokens, "seed-ignored", params=_no_seed),
    _with(sampling.filter_logits, "top-k-off-by-one", params=_one_more),
    _with(sampling.filter_logits, "min-p-ignored", params=_no_min_p),
    _with(sampling.philox_uniform, "index-ignored", sample_index=torch.zeros_like),
    _with(sampling.apply_controls, "bias-twice", controls=_bias_twice),
    _with(sampling.apply_controls, "bans-ignored", controls=lambda c: c._replace(banned=None)),
    _with(sampling.apply_controls, "pending-ignored", controls=_nothing_pending),
    _with(sampling.count_tokens, "slot-aliased", slots=_shift_slots),
    _after(sampling.token_logprobs, "rank-from-zero", _rank_from_zero),
    _after(sampling.finite_rows, "inverted", torch.logical_not),
    _with(state.correct_inputs, "remap-skipped", remap=lambda r: torch.full_like(r, NEWCOMER)),
    _with(state.correct_inputs, "accepted-ignored", results=_none_accepted),
    _with(state.correct_inputs, "limits-ignored", limits=lambda x: x + 100),
    _with(state.correct_inputs, "absent-drafts-fed", draft_ids=lambda d: d.clamp_min(0)),
    _with(state.next_inputs, "accepted-ignored", num_accepted=torch.zeros_like),
    _with(state.next_inputs, "as-prefill", kind=lambda kind: StepKind.PREFILL),
    _with(spec.draft_context, "rejected-written", num_accepted=lambda n: n + 1),
    _with(spec.draft_context, "ring-too-large", ring=lambda ring: ring + 1),
    _with(spec.verify_drafts, "drafter-ignored", draft_logits=lambda logits: None),
    _with(spec.verify_drafts, "next-position", params=_next_position),
    _with(spec.verify_drafts, "absent-drafts-verified", draft_ids=lambda d: d.clamp_min(0)),
    _with(spec.verify_drafts, "another-temperature-in-the-drafter", draft_logits=_cooled),
    _after(spec.verify_drafts, "one-too-many", _one_more_accepted),
    _with(spec.draft_plan, "anchor-off-by-one", anchor_positions=lambda p: (p - 1).clamp_min(0)),
    _with(spec.draft_plan, "floors-ignored", floors=torch.zeros_like),
    _after(spec.draft_plan, "causal-in-the-block", _last_key_hidden),
    _with(spec.draft_confidence, "temperature-ignored", temperature=torch.ones_like),
    _with(spec.draft_confidence, "features-ignored", features=torch.zeros_like),
    _with(spec.admit_drafts, "budget-off-by-one", budget=lambda b: b + 1),
    _with(spec.admit_drafts, "all-available", available=lambda a: torch.full_like(a, 5)),
    _with(spec.admit_drafts, "floor-ignored", survival=lambda s: s + 1e-5),
    _after(spec.admit_drafts, "requests-exchanged", lambda n: n.flip(0)),
    _with(state.row_layout, "context-stale", context_lens=lambda c: (c - 1).clamp_min(0)),
    _with(state.window_plan, "floors-ignored", floors=torch.zeros_like),
    _with(state.window_plan, "slots-ignored", seq_slots=lambda s: torch.arange(len(s))),
    _with(state.compress_plan, "ring-too-large", pending_ring=lambda ring: ring + 1),
    _with(state.compress_plan, "table-shifted", block_table=lambda t: t + 1),
)  # fmt: skip


def _mutated(backend: ReferenceBackend, mutant: Mutant) -> ReferenceBackend:
    """The backend with one op replaced; composite ops are built from what is there then."""
    table = OpTable("mutant", device="cpu", dtype="any")
    for op in load_all().values():
        if op.compose is None:
            function = backend.ops[op]
            table.implements(op)(mutant.mutate(function) if op is mutant.spec else function)
    if mutant.spec.compose is not None:
        # A backend that has the composite as one op of its own, and has it wrong.
        table.implements(mutant.spec)(mutant.mutate(mutant.spec.compose(table)))
    backend.ops = table
    return backend


def _is_caught(mutant: Mutant, numerics: Numerics) -> bool:
    config = BackendConfig("reference", numerics, {"runtime": "inline"})
    wrong = _mutated(ReferenceBackend(config), mutant)
    cases = [case for case in op_cases(_prefix(mutant)) if case.numerics is numerics]
    # An empty step of this op is a known gap of the reference and says nothing here.
    return any(
        not run_case(wrong, case, None).passed for case in cases if "n=0" not in case.sample.name
    )


def _prefix(mutant: Mutant) -> str:
    return f"ops/{mutant.spec.family}/{mutant.spec.name}:"


@pytest.mark.parametrize("mutant", [pytest.param(m, id=f"{m.spec.name}:{m.name}") for m in MUTANTS])
@pytest.mark.parametrize("numerics", Numerics)
def test_planted_mistake_is_caught(mutant: Mutant, numerics: Numerics) -> None:
    assert _is_caught(mutant, numerics)


def test_mutant_of_a_part_is_caught_in_the_composite() -> None:
    mutant = next(m for m in MUTANTS if m.spec is mhc.mhc_expand)
    config = BackendConfig("reference", Numerics.NORMATIVE, {"runtime": "inline"})
    wrong = _mutated(ReferenceBackend(config), mutant)
    case = op_cases("ops/mhc/mhc_boundary:normative,control")[0]
    assert not run_case(wrong, case, None).passed


def test_markov_bias_of_another_token_is_caught() -> None:
    mutant = next(m for m in MUTANTS if m.spec is quant.embed)
    config = BackendConfig("reference", Numerics.EXACT, {"runtime": "inline"})
    wrong = _mutated(ReferenceBackend(config), mutant)
    case = op_cases("ops/spec/markov_step:exact,control")[0]
    assert not run_case(wrong, case, None).passed


def test_mutants_cover_every_primitive_op() -> None:
    seen_through_others = {"engram_fetch_wait"}
    mutated = {mutant.spec.name for mutant in MUTANTS} | seen_through_others
    primitive = {op.name for op in load_all().values() if op.compose is None}
    assert primitive <= mutated


@pytest.fixture(scope="module")
def recordings() -> dict[object, object]:
    """Runs of the reference, made once for all mutants."""
    return {}


# Every mistake in an op that the backbone calls; sampling, drafts and the correction of steps in
# flight are not part of a traced sequence.
TRACED = [
    mutant
    for mutant in MUTANTS
    if mutant.spec.family not in ("sampling", "spec")
    and mutant.spec not in (state.correct_inputs, state.next_inputs, mhc.mhc_collapse)
]
# Mistakes that a sequence of text tokens, its first prefill and decode steps cannot show.
NO_DIVERGENCE: set[str] = set()
LOCATED: set[str] = set()


@pytest.mark.parametrize("mutant", [pytest.param(m, id=f"{m.spec.name}:{m.name}") for m in TRACED])
def test_planted_mistake_is_located(mutant: Mutant, recordings: dict[object, object]) -> None:
    bench = Bench(
        "reference",
        {"runtime": "inline"},
        load=lambda config: _mutated(ReferenceBackend(config), mutant),
    )
    bench.recordings = recordings
    config = EngineConfig(max_model_len=128)
    found = locate(bench, config, SEQUENCE, Numerics.NORMATIVE)
    bench.close()
    LOCATED.add(f"{mutant.spec.name}:{mutant.name}")
    if not found.op and not any(found.growth.values()):
        NO_DIVERGENCE.add(f"{mutant.spec.name}:{mutant.name}")
        return  # the trace does not diverge: the cases of the op are what catches it
    assert found.op == f"{mutant.spec.family}/{mutant.spec.name}", found.line
    assert "on equal inputs" in found.line


def test_most_planted_mistakes_show_in_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs after the tests above and prints the counts."""
    if len(LOCATED) < len(TRACED):
        pytest.skip(f"{len(LOCATED)} of {len(TRACED)} mistakes were located in this run")
    with capsys.disabled():
        print(
            f"\nplanted mistakes: {len(MUTANTS)}; in ops that a traced sequence runs: "
            f"{len(TRACED)}; without effect on it: {sorted(NO_DIVERGENCE)}"
        )
    assert len(MUTANTS) >= 40
    assert len(NO_DIVERGENCE) <= len(TRACED) // 5
