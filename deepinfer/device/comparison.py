"""How the output of an op is compared with the reference, and where each bound comes from.

The conformance suite interprets these; a contract only declares them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exact:
    """Bit equality: integer work, moves, masks, quantisers on identical input."""

    origin: str = "integer or representable arithmetic: no rounding is left to the implementation"


@dataclass(frozen=True, slots=True)
class Codes:
    """Equal quantised values except a share of elements that may be one code off.

    Attributes:
        max_share: largest share of elements that may differ, each by one code of its format.
    """

    max_share: float = 1e-4
    origin: str = "a fused norm or rotation whose fp32 sum order differs can cross a rounding tie"


@dataclass(frozen=True, slots=True)
class Ulp:
    """Within 1 ulp of the output dtype for `share_1ulp` of elements, 2 ulp for all.

    Attributes:
        atol_row_rms: absolute slack, in units of the row's root mean square.
    """

    share_1ulp: float = 0.999
    atol_row_rms: float = 1e-6
    origin: str = "elementwise or row reductions in fp32 with one final cast"


@dataclass(frozen=True, slots=True)
class Close:
    """|x - ref| <= atol + rtol * |ref| for every element."""

    rtol: float = 2e-5
    atol: float = 1e-6
    origin: str = "fp32 transcendental functions and row reductions"


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: relative Frobenius error, largest error over row magnitude, and diff.

    diff is 1 - 2<x, y> / (<x, x> + <y, y>) in float64.
    """

    max_frobenius: float = 1e-3
    max_error_row: float = 2.0**-7
    max_diff: float = 1e-6
    origin: str = "exact products, fp32 accumulation order flips about 1 % of bf16 roundings"


@dataclass(frozen=True, slots=True)
class SelectionSet:
    """Equal sets of indices after dropping candidates within `rtol` of the k-th score."""

    rtol: float = 2.0**-7
    origin: str = "ties at the boundary are implementation defined; bf16 scores make them common"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Sampled frequencies against exact probabilities; equal draws when uniforms are shared."""

    num_draws: int = 100_000
    false_alarm: float = 1e-6
    origin: str = "chi-square at the stated false-alarm rate"


Comparison = Exact | Codes | Ulp | Close | Product | SelectionSet | Distribution

PROJECTION = Close(
    rtol=2e-3,
    atol=1e-5,
    origin="library projections run in TF32 or split bf16: 2^-11 relative per product",
)
ATTENTION = Product(
    max_frobenius=4e-3,
    max_error_row=2.0**-6,
    max_diff=1e-5,
    origin="P is rounded to bf16 before PV: 2^-9 per term over up to 640 terms",
)
