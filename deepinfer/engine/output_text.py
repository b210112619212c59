"""Text of one answer: tokens to characters, stop strings held back until decided."""

from __future__ import annotations

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.text.detokenizer import StreamDetokenizer
from deepinfer.text.stop import StopMatcher
from deepinfer.text.tokenizer import TextTokenizer


class OutputText:
    """Cumulative text of committed tokens; empty when the request wants no text.

    Only stop strings need the text of every token at once. Without them tokens are kept and
    turned into text together, when somebody reads it.
    """

    def __init__(self, tokenizer: TextTokenizer, params: SamplingParams) -> None:
        self._detokenizer = (
            StreamDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize
            else None
        )
        self._matcher: StopMatcher | None = None
        if params.stop_strings:
            self._matcher = StopMatcher(
                params.stop_strings, include_in_output=params.include_stop_str_in_output
            )
        self._unread: list[int] = []
        self._text = ""

    @property
    def text(self) -> str:
        """The text so far, without what may still turn out to be a stop string."""
        if self._unread and self._detokenizer is not None:
            self._text += self._detokenizer.push_all(self._unread)
            self._unread.clear()
        return self._text

    def push(self, token_id: int, *, armed: bool) -> str | None:
        """Add one committed token.

        Args:
            token_id: the token.
            armed: whether a stop string may end the answer here (min_tokens reached).

        Returns:
            The stop string that ends the answer, or None.
        """
        if self._detokenizer is None:
            return None
        if self._matcher is None:
            self._unread.append(token_id)
            return None
        step = self._matcher.push(self._detokenizer.push(token_id), armed=armed)
        self._text += step.emit
        return step.matched

    def finish(self) -> None:
        """Release what was held back as a possible stop string."""
        if self._matcher is not None and self._matcher.matched is None:
            self._text += self._matcher.flush()
