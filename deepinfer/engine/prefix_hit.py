"""What a sequence takes over at admission."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepinfer.cache.host_tier import HostState
from deepinfer.model.replay import ALL_ROWS, PrefillRows


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The beginning that is known of a sequence, and what is left to compute.

    Attributes:
        num_tokens: tokens whose blocks are taken over, and are not written any more.
        rows: rows that its prefill runs. Those before `num_tokens` rebuild its windows, or follow
            windows that are loaded.
        blocks: blocks on the device, in order.
        saved: states of the blocks after these, to be loaded.
        window: state of the windows before position `rows.first`, to be loaded; None when there
            is nothing before it or the windows are rebuilt.
        has_window: the windows come from such a state, also after it was loaded.
        is_exact: the blocks hold what a run from the start would have written.
    """

    num_tokens: int = 0
    rows: PrefillRows = ALL_ROWS
    blocks: tuple[int, ...] = ()
    saved: tuple[HostState, ...] = ()
    window: HostState | None = None
    is_exact: bool = True
    has_window: bool = False

    @property
    def loaded(self) -> PrefixHit:
        """The same without the states, so that the host tier alone decides how long they stay."""
        if not self.saved and self.window is None:
            return self
        return replace(self, saved=(), window=None)


NO_HIT = PrefixHit()
