"""Text of one answer: tokens to characters, stop strings held back until decided."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.text.detokenizer import StreamDetokenizer
from deepinfer.text.stop import StopMatcher
from deepinfer.text.tokenizer import TextTokenizer


class OutputText:
    """Cumulative text of committed tokens; empty when the request wants no text.

    Only stop strings need the text of every token at once. Without them tokens are turned into
    text together, when somebody reads it.

    Attributes:
        awaits_stop: whether every token has to be pushed, because a stop string may end with it.
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
        self.awaits_stop = self._matcher is not None
        self._num_read = 0
        self._text = ""

    def read(self, token_ids: Sequence[int]) -> str:
        """The text so far, without what may still turn out to be a stop string.

        Args:
            token_ids: all tokens of the answer.
        """
        if self._detokenizer is not None and not self.awaits_stop:
            self._text += self._detokenizer.push_all(token_ids[self._num_read :])
            self._num_read = len(token_ids)
        return self._text

    def push(self, token_id: int, *, armed: bool) -> str | None:
        """Add one committed token of an answer that awaits a stop string.

        Args:
            token_id: the token.
            armed: whether a stop string may end the answer here (min_tokens reached).

        Returns:
            The stop string that ends the answer, or None.
        """
        assert self._matcher is not None  # it awaits a stop string
        assert self._detokenizer is not None  # without text there are no stop strings
        step = self._matcher.push(self._detokenizer.push(token_id), armed=armed)
        self._text += step.emit
        return step.matched

    def finish(self) -> None:
        """Release what was held back as a possible stop string."""
        if self._matcher is not None and self._matcher.matched is None:
            self._text += self._matcher.flush()
