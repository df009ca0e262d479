"""Stop strings: nothing of one is ever shown, wherever the text is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stops import StopScanner


def scan(pieces, stops, include=False):
    """Shown text and whether a stop was hit, fed until then."""
    scanner = StopScanner(stops, include)
    shown = []
    for piece in pieces:
        shown.append(scanner.push(piece))
        if scanner.is_hit:
            break
    return "".join(shown) + scanner.flush(), scanner.is_hit


def expected(text, stops, include):
    """By definition: cut at the match that ends first, and of those at the one that starts first."""
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not matches:
        return text, False
    end, start = min(matches)
    return text[: end if include else start], True


def cut(text, places):
    edges = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in pairwise(edges)]


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    places=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_any_cutting_gives_what_the_definition_says(text, stops, places, include):
    assert scan(cut(text, places), stops, include) == expected(text, stops, include)


@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=5))
def test_held_text_is_the_longest_end_that_may_become_a_stop(text, stop):
    scanner = StopScanner([stop], False)
    shown = "".join(scanner.push(char) for char in text)
    if not scanner.is_hit:
        longest = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
        assert shown == text[: len(text) - longest]


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["he", "llo S", "TO", "P more"], ["STOP"], "hello "),
        (["aab"], ["ab"], "a"),
        (["abab", "c"], ["abac"], "ababc"),
        (["xyz"], ["yz", "y"], "x"),
        (["a", "b", "c"], ["abc", "b"], "a"),
        (["日", "本", "語"], ["本語"], "日"),
    ],
)
def test_examples(pieces, stops, shown):
    assert scan(pieces, stops)[0] == shown


def test_nothing_comes_after_a_hit():
    scanner = StopScanner(["x"], False)
    assert scanner.push("axb") == "a"
    assert scanner.push("more") == ""
    assert scanner.flush() == ""


def test_text_before_a_false_start_is_not_lost():
    assert scan(["ST", "O", " and so on"], ["STOP"]) == ("STO and so on", False)
    assert scan(["ends with ST"], ["STOP"]) == ("ends with ST", False)
