"""Numerics and determinism modes, shared by configuration, model and backends."""

from __future__ import annotations

import enum


class Numerics(enum.Enum):
    """How numbers are rounded between ops.

    EXACT: every stored weight is dequantised once to fp32, activations and caches are fp32 and
    nothing is rounded in between. NORMATIVE: bf16 activations, FP8/FP4 quantisation of
    activations and caches at the published rounding points.
    """

    EXACT = "exact"
    NORMATIVE = "normative"


class Determinism(enum.Enum):
    """What is promised about repeated runs.

    OFF: nothing. BATCH_INVARIANT: a row's bits do not depend on its batch, position in it or
    chunking. DETERMINISTIC: batch invariant, and sampling needs fixed seeds (no dynamic drafts).
    """

    OFF = "off"
    BATCH_INVARIANT = "batch_invariant"
    DETERMINISTIC = "deterministic"
