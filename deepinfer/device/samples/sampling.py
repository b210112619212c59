"""Samples of the sampling family: one filter or control at a time around a plain batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import sampling
from deepinfer.device.ops.sampling import (
    LogitControls,
    Penalties,
    Purpose,
    SampleParams,
    SampleWork,
    SparseBias,
    SparseIds,
)
from deepinfer.device.samples.draws import integers, normal, strided
from deepinfer.device.samples.registry import Arguments, Builder, Sample, declare, declare_sample

_VOCAB = 37
_NUM_ROWS = 5
_NUM_SLOTS = 4
_LAST_WORD = 2**32 - 1


def _logits(generator: torch.Generator, num_rows: int = _NUM_ROWS) -> Tensor:
    return 3.0 * normal(generator, num_rows, _VOCAB)


def _filled(value: float, num_rows: int) -> Tensor:
    return torch.full((num_rows,), value, dtype=torch.float32)


def _params(
    generator: torch.Generator,
    num_rows: int = _NUM_ROWS,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SampleParams:
    return SampleParams(
        temperature=_filled(temperature, num_rows),
        top_k=torch.full((num_rows,), top_k),
        top_p=_filled(top_p, num_rows),
        min_p=_filled(min_p, num_rows),
        seeds=integers(generator, 2**62, num_rows),
        sample_index=integers(generator, 4, num_rows),
        positions=integers(generator, 2**20, num_rows),
    )


def _uniform(num_rows: int, num: int, purpose: Purpose = Purpose.SAMPLE) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        params = _params(generator, num_rows)
        return {
            "seeds": params.seeds,
            "sample_index": params.sample_index,
            "positions": params.positions,
            "purpose": purpose,
            "num": num,
        }

    return build


def _uniform_extremes(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {
        "seeds": torch.tensor([0, -1, -(2**63), 2**63 - 1]),
        "sample_index": torch.tensor([0, _LAST_WORD, 1, 0]),
        "positions": torch.tensor([0, _LAST_WORD, 0, 2**20 - 1]),
        "purpose": Purpose.SAMPLE,
        "num": 6,
    }


declare(
    sampling.philox_uniform,
    {
        "control": _uniform(_NUM_ROWS, 32),
        "num=0": _uniform(_NUM_ROWS, 0),
        "num=1": _uniform(1, 1),
        "num=1027": _uniform(2, 1027),
        "zero_rows": _uniform(0, 8),
        "extremes": _uniform_extremes,
        **{f"purpose={p.name.lower()}": _uniform(2, 8, p) for p in Purpose},
    },
)


def _allowed(generator: torch.Generator) -> Tensor:
    allowed = integers(generator, 4, _NUM_ROWS, _VOCAB) > 0
    allowed[1] = False
    allowed[1, _VOCAB - 1] = True
    return allowed


def _banned(generator: torch.Generator) -> SparseIds:
    return SparseIds(torch.tensor([0, 0, 4, -1, 0]), torch.tensor([0, 5, _VOCAB - 1, 3, 5]))


def _bias(generator: torch.Generator) -> SparseBias:
    return SparseBias(
        torch.tensor([0, 2, 2, -1]),
        torch.tensor([1, 0, _VOCAB - 1, 0]),
        torch.tensor([-100.0, 100.0, 0.5, 1.0]),
    )


def _penalties(
    generator: torch.Generator,
    *,
    repetition: bool = True,
    counted: bool = True,
    num_pending: int = 0,
) -> Penalties:
    ones = torch.ones(_NUM_ROWS)
    return Penalties(
        repetition=ones * 1.3 if repetition else ones,
        presence=torch.linspace(-2.0, 2.0, _NUM_ROWS) if counted else 0.0 * ones,
        frequency=torch.linspace(1.5, -1.0, _NUM_ROWS) if counted else 0.0 * ones,
        slots=torch.tensor([_NUM_SLOTS - 1, 0, -1, 2, 0]),
        output_counts=(integers(generator, 6, _NUM_SLOTS, _VOCAB) - 3).clamp_min(0).int(),
        prompt_seen=integers(generator, 3, _NUM_SLOTS, _VOCAB) == 0,
        # Few different tokens, so that one is pending twice; -1 is none.
        pending=integers(generator, 4, _NUM_ROWS, num_pending) - 1,
    )


def _controlled(make: Callable[[torch.Generator], LogitControls]) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {"logits": _logits(generator), "controls": make(generator)}

    return build


def _all_controls(generator: torch.Generator) -> LogitControls:
    return LogitControls(
        _allowed(generator), _banned(generator), _bias(generator), _penalties(generator)
    )


def _controlled_strided(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {"logits": strided(_logits(generator)), "controls": _all_controls(generator)}


def _controlled_nothing(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {"logits": _logits(generator, 0), "controls": LogitControls()}


declare(
    sampling.apply_controls,
    {
        "control": _controlled(_all_controls),
        "none": _controlled(lambda g: LogitControls()),
        "allowed": _controlled(lambda g: LogitControls(allowed=_allowed(g))),
        "banned": _controlled(lambda g: LogitControls(banned=_banned(g))),
        "bias": _controlled(lambda g: LogitControls(bias=_bias(g))),
        "repetition": _controlled(lambda g: LogitControls(penalties=_penalties(g, counted=False))),
        "counted": _controlled(lambda g: LogitControls(penalties=_penalties(g, repetition=False))),
        "pending": _controlled(lambda g: LogitControls(penalties=_penalties(g, num_pending=5))),
        "strided": _controlled_strided,
        "zero_rows": _controlled_nothing,
    },
)


def _filtered(work: SampleWork = SampleWork.SORTED, **controls: float) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        params = _params(generator, **controls)  # type: ignore[arg-type]
        return {"logits": _logits(generator), "params": params, "work": work}

    return build


def _mixed(num_rows: int) -> Builder:
    """Every row with its own controls, greedy ones among them."""

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        row = torch.arange(num_rows)
        params = _params(generator, num_rows)._replace(
            temperature=torch.tensor([0.0, 0.7, 1.0, 1e-4, 2.5])[row % 5],
            top_k=torch.tensor([3, 0, 1, 20])[row % 4],
            top_p=torch.tensor([0.5, 0.9, 1.0])[row % 3],
            min_p=torch.tensor([0.0, 0.05])[row % 2],
        )
        logits = _logits(generator, num_rows)
        return {"logits": logits, "params": params, "work": SampleWork.SORTED}

    return build


def _tied(generator: torch.Generator, numerics: Numerics) -> Arguments:
    """Equal logits at every cut: by top-k, exactly at top-p, and for the best token."""
    params = _params(generator, 3)._replace(
        temperature=torch.tensor([1.0, 1.0, 0.0]),
        top_k=torch.tensor([5, 0, 0]),
        top_p=torch.tensor([1.0, 0.5, 1.0]),
    )
    logits = torch.full((3, 32), 2.0)
    return {"logits": logits, "params": params, "work": SampleWork.SORTED}


def _masked(generator: torch.Generator, numerics: Numerics) -> Arguments:
    """Removed tokens, down to a single one that is left."""
    logits = _logits(generator)
    logits[0, ::2] = -math.inf
    logits[1, 1:] = -math.inf
    params = _params(generator, top_k=30, top_p=0.99)
    return {"logits": logits, "params": params, "work": SampleWork.SORTED}


def _strided_logits(generator: torch.Generator, numerics: Numerics) -> Arguments:
    params = _params(generator, top_k=7)
    return {
        "logits": strided(_logits(generator)),
        "params": params,
        "work": SampleWork.SORTED,
    }


def _unusable(generator: torch.Generator, numerics: Numerics) -> Arguments:
    """Rows 1 to 3 cannot be sampled from; their neighbours must not notice."""
    logits = _logits(generator)
    logits[1, 4] = math.nan
    logits[2, 4] = math.inf
    logits[3] = -math.inf
    params = _params(generator, top_p=0.9)
    return {"logits": logits, "params": params, "work": SampleWork.SORTED}


_FILTERS: dict[str, Builder] = {
    "control": _mixed(8),
    "zero_rows": _mixed(0),
    "one_row": _mixed(1),
    "greedy": _filtered(SampleWork.GREEDY, temperature=0.0),
    "random": _filtered(SampleWork.RANDOM),
    "lowest_temperature": _filtered(SampleWork.RANDOM, temperature=1e-4),
    "high_temperature": _filtered(SampleWork.RANDOM, temperature=1e6),
    "min_p": _filtered(SampleWork.RANDOM, min_p=0.1),
    "min_p=1": _filtered(SampleWork.RANDOM, min_p=1.0),
    "top_k=1": _filtered(top_k=1),
    "top_k": _filtered(top_k=5),
    "top_k=vocab": _filtered(top_k=_VOCAB),
    "top_k>vocab": _filtered(top_k=_VOCAB + 1),
    "top_p=0": _filtered(top_p=0.0),
    "top_p": _filtered(top_p=0.85),
    "top_k,top_p": _filtered(top_k=6, top_p=0.7),
    "ties": _tied,
    "masked": _masked,
    "strided": _strided_logits,
}

declare(sampling.filter_logits, _FILTERS)
declare_sample(sampling.filter_logits, Sample("unusable", _unusable, loose_rows={"out": (1, 2, 3)}))


def _drawn(build: Builder, purpose: Purpose) -> Builder:
    def build_draw(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {**build(generator, numerics), "purpose": purpose}

    return build_draw


declare(
    sampling.sample_tokens,
    {name: _drawn(build, Purpose.SAMPLE) for name, build in _FILTERS.items()},
)
declare(
    sampling.sample_tokens,
    {f"purpose={p.name.lower()}": _drawn(_mixed(8), p) for p in Purpose},
)
declare_sample(
    sampling.sample_tokens,
    Sample("unusable", _drawn(_unusable, Purpose.SAMPLE), loose_rows={"out": (1, 2, 3)}),
)


def _scored(
    num_top: int, num_rows: int = _NUM_ROWS, change: Callable[[Tensor], Tensor] | None = None
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        logits = _logits(generator, num_rows)
        return {
            "logits": logits if change is None else change(logits),
            "ids": integers(generator, _VOCAB, num_rows),
            "num_top": num_top,
        }

    return build


def _impossible(logits: Tensor) -> Tensor:
    """Odd tokens have no probability; a chosen one may be among them."""
    logits[:, 1::2] = -math.inf
    return logits


declare(
    sampling.token_logprobs,
    {
        "control": _scored(5),
        "num_top=0": _scored(0),
        "num_top=vocab": _scored(_VOCAB),
        "zero_rows": _scored(5, 0),
        "one_row": _scored(5, 1),
        "ties": _scored(20, change=torch.zeros_like),
        "impossible": _scored(25, change=_impossible),
        "large": _scored(5, change=lambda logits: 1e4 * logits),
        "strided": _scored(5, change=strided),
    },
)


def _rows_of(*rows: list[float]) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {"logits": torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)}

    return build


_NAN, _INF, _LARGEST = math.nan, math.inf, torch.finfo(torch.float32).max

declare(
    sampling.finite_rows,
    {
        "control": lambda generator, numerics: {"logits": _logits(generator)},
        "zero_rows": lambda generator, numerics: {"logits": _logits(generator, 0)},
        "usable": _rows_of([0.0, -_INF, -_INF], [_LARGEST, -_LARGEST, 0.0]),
        "unusable": _rows_of([_NAN, 0.0], [0.0, _INF], [-_INF, -_INF], [-_INF, _NAN], [0.0, 0.0]),
        "strided": lambda generator, numerics: {"logits": strided(_logits(generator))},
    },
)


def _counted(ids: list[int], slots: list[int]) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {
            "ids": torch.tensor(ids, dtype=torch.int64),
            "slots": torch.tensor(slots, dtype=torch.int64),
            "output_counts": integers(generator, 3, _NUM_SLOTS, _VOCAB).int(),
        }

    return build


declare(
    sampling.count_tokens,
    {
        "control": _counted([0, _VOCAB - 1, 7], [0, _NUM_SLOTS - 1, 2]),
        "zero_tokens": _counted([], []),
        "skipped": _counted([-1, 3, _VOCAB], [-1, -1, -1]),
        "repeated": _counted([4, 4, 4, 5], [1, 1, 2, 1]),
    },
)
