"""The ops that only the drafter calls; a backend without them runs without drafting."""

from __future__ import annotations

from deepinfer.device.op import OpTable
from deepinfer.device.ops import mhc, sampling, spec
from deepinfer.model.model_ops import require_ops

_NEEDED = (
    mhc.mhc_collapse,
    sampling.sample_tokens,
    spec.draft_confidence,
    spec.draft_context,
    spec.draft_plan,
    spec.markov_step,
)


class DraftOps:
    """The drafter's own ops, as attributes with their exact signatures."""

    def __init__(self, table: OpTable) -> None:
        """Bind the ops of `table`.

        Raises:
            CapabilityError: ops are missing; all of them are named with dtype and device.
        """
        require_ops(table, _NEEDED, purpose="draft tokens")
        self.mhc_collapse = table[mhc.mhc_collapse]
        self.sample_tokens = table[sampling.sample_tokens]
        self.draft_confidence = table[spec.draft_confidence]
        self.draft_context = table[spec.draft_context]
        self.draft_plan = table[spec.draft_plan]
        self.markov_step = table[spec.markov_step]
