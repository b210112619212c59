"""Integer codes by which operators take dtypes that torch has no name for.

Low codes are torch's own scalar types; those from 285 on are torch_npu's. All of them stand in
`signatures.json` with the torch dtype that carries them.
"""

from __future__ import annotations

from typing import Final

FP16: Final = 5
FP32: Final = 6
BF16: Final = 15
E4M3: Final = 292
E8M0: Final = 293
E2M1_X2: Final = 296
"""Two E2M1 values in a byte."""
