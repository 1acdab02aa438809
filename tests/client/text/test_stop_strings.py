"""Stop strings that fall across pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqengine.errors import BadRequest
from zmqengine_client.text.stop_strings import StopAutomaton, StopStrings, stop_list

letters = st.text("ab\n", max_size=30)
stops_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is completed first; the longest of several."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(letters, stops_lists, st.data())
def test_any_cut_of_the_text_gives_what_a_search_of_the_whole_gives(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """A search of the full text is the reference."""
    finder = StopStrings(StopAutomaton(stops))
    out = ""
    rest = text
    while rest and finder.match is None:
        length = data.draw(st.integers(1, len(rest)))
        out += finder.push(rest[:length])
        rest = rest[length:]
    out += finder.finish()
    want, match = naive(text, stops)
    if finder.match is None:
        assert match is None
        assert out == want
    else:
        assert match is not None
        assert out == naive_up_to(text, stops, rest)


def naive_up_to(text: str, stops: list[str], rest: str) -> str:
    """The reference for pieces: within one piece, too, the first stop string completed counts."""
    return naive(text[: len(text) - len(rest)], stops)[0]


@given(letters, stops_lists)
def test_character_by_character_the_match_is_the_naive_one(text: str, stops: list[str]) -> None:
    """Which stop string it was is told, and nothing comes after it."""
    finder = StopStrings(StopAutomaton(stops))
    out = "".join(finder.push(character) for character in text) + finder.finish()
    assert (out, finder.match) == naive(text, stops)


@given(letters, stops_lists)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    """A reader waits only for characters that may have to be taken back."""
    finder = StopStrings(StopAutomaton(stops))
    out = "".join(finder.push(character) for character in text)
    if finder.match is None:
        held = text[len(out) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], [None]])
def test_empty_stop_strings_and_other_types_are_refused(stop: list) -> None:  # type: ignore[type-arg]
    """mlx_lm.server: `stop: 4` kills the generation thread. Here it is refused by name."""
    with pytest.raises(BadRequest, match="stop"):
        stop_list(stop)


def test_one_string_is_one_stop_string() -> None:
    """Not one for each of its letters."""
    assert stop_list("ab") == ["ab"]
    assert stop_list(("a", "b")) == ["a", "b"]
    assert stop_list("") == []
