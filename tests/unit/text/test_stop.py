"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.text.stop import StopMatcher


def _run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """What is emitted for each piece (the flush last), and the match."""
    emitted = [matcher.push(piece).emit for piece in pieces]
    return [*emitted, matcher.flush()], matcher.matched


def test_stop_string_across_pieces_is_cut_and_never_leaks() -> None:
    assert _run(StopMatcher(["b,c"]), ["a,", "b,", "c"]) == (["a,", "", "", ""], "b,c")


def test_held_text_comes_out_when_it_was_no_stop_string() -> None:
    assert _run(StopMatcher(["b,c"]), ["ab", ",", "x"]) == (["a", "", "b,x", ""], None)


def test_held_text_comes_out_at_the_end() -> None:
    assert _run(StopMatcher(["END"]), ["aEN"]) == (["a", "EN"], None)


def test_stop_string_is_kept_when_wanted() -> None:
    matcher = StopMatcher(["b,c"], include_in_output=True)
    assert _run(matcher, ["a,b", ",cd"]) == (["a,", "b,c", ""], "b,c")


def test_text_after_a_match_is_dropped() -> None:
    assert _run(StopMatcher(["."]), ["a.b", "c"]) == (["a", "", ""], ".")


def test_stop_string_that_is_complete_first_wins() -> None:
    assert _run(StopMatcher(["bcd", "c"]), ["abcd"]) == (["ab", ""], "c")


def test_longest_wins_when_complete_at_the_same_character() -> None:
    assert _run(StopMatcher(["c", "bc"]), ["abc"]) == (["a", ""], "bc")


def test_overlapping_beginnings_are_not_lost() -> None:
    assert _run(StopMatcher(["aab"]), ["a", "a", "a", "b"])[1] == "aab"


def test_without_stop_strings_everything_passes() -> None:
    assert _run(StopMatcher([]), ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_match_inside_an_unarmed_piece_does_not_count() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc", armed=False) == ("abc", None)
    assert matcher.push("b") == ("", "b")


def test_match_that_ends_in_an_armed_piece_counts() -> None:
    matcher = StopMatcher(["bc"])
    assert matcher.push("ab", armed=False) == ("a", None)
    assert matcher.push("c") == ("", "bc")


def test_unarmed_match_in_held_text_is_not_found_later() -> None:
    matcher = StopMatcher(["bcd", "c"])
    assert matcher.push("bc", armed=False) == ("", None)
    assert matcher.push("x") == ("bcx", None)


@pytest.mark.parametrize("include", [False, True])
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_result_does_not_depend_on_the_pieces(
    include: bool, pieces: list[str], stops: list[str]
) -> None:
    cut = _run(StopMatcher(stops, include_in_output=include), pieces)
    whole = _run(StopMatcher(stops, include_in_output=include), ["".join(pieces)])
    assert ("".join(cut[0]), cut[1]) == ("".join(whole[0]), whole[1])


@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=4))
def test_emitted_text_is_what_precedes_the_stop_string(text: str, stop: str) -> None:
    emitted, matched = _run(StopMatcher([stop]), list(text))
    assert "".join(emitted) == text.partition(stop)[0]
    assert (matched is not None) == (stop in text)
