"""Text that leaves piece by piece: whole characters, and nothing of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.config import ConfigError
from dflash_jax.streaming import StopStrings, StreamDecoder
from dflash_jax.tokenizer import ByteTokenizer


def test_a_character_waits_for_its_last_byte():
    stream = StreamDecoder(ByteTokenizer())
    assert [stream.push([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.flush() == ""


def test_a_character_that_never_becomes_whole():
    stream = StreamDecoder(ByteTokenizer())
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(b"a") == "a"  # a new text


def test_a_wrong_byte_does_not_hold_back_what_follows():
    assert StreamDecoder(ByteTokenizer()).push([0xF0, 0x41]) == "\ufffdA"


@given(raw=st.binary(), cut=st.integers(0, 20))
def test_stream_of_any_bytes_equals_decode(raw, cut):
    tokenizer = ByteTokenizer()
    stream = StreamDecoder(tokenizer)
    assert stream.push(raw[:cut]) + stream.push(raw[cut:]) + stream.flush() == tokenizer.decode(raw)


def test_stop_string_over_several_pushes():
    stops = StopStrings(["\nUser:", "END"])
    assert stops.push("hi\nUs") == ("hi", False)
    assert stops.push("ual E") == ("\nUsual ", False)
    assert stops.push("ND, more") == ("", True)
    assert stops.stopped
    assert stops.push("more") == ("", True)
    assert stops.flush() == ""


def test_stop_flush_gives_what_was_held():
    stops = StopStrings(["END"])
    assert stops.push("an E") == ("an ", False)
    assert stops.flush() == "E"


def test_no_stop_strings_hold_nothing():
    assert StopStrings([]).push("text") == ("text", False)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "END"])
def test_bad_stop_strings(stops):
    with pytest.raises(ConfigError, match="stop string"):
        StopStrings(stops)


def first_stop(text: str, stops: list[str]) -> str:
    """What remains of `text`, a character at a time and by definition."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    pieces=st.lists(st.text("abc", max_size=4)),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_does_not_depend_on_the_cuts(pieces, stops):
    stopper = StopStrings(stops)
    emitted = "".join([stopper.push(piece)[0] for piece in pieces]) + stopper.flush()
    text = "".join(pieces)
    assert emitted == first_stop(text, stops)
    assert stopper.stopped == any(stop in text for stop in stops)


@given(text=st.text("abc"), stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_than_a_stop_string_needs(text, stops):
    stopper = StopStrings(stops)
    emitted, stopped = stopper.push(text)
    if not stopped:
        held = text[len(emitted) :]
        assert not held or any(stop.startswith(held) for stop in stops)
