"""Text that leaves token by token: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from dflash_jax.config import ConfigError


class Vocabulary:
    """What decoding needs of a tokenizer: the bytes of a token.

    strips_space: the text's first character is dropped when it is a space (SentencePiece puts one
    in front of every text it encodes).
    """

    strips_space: bool = False

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        """The bytes of one token: any part of a character, or none (a special token when they are
        skipped; a row of the embedding beyond the vocabulary)."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD. Nothing is cleaned up: spaces
        before punctuation stay as the model wrote them."""
        raw = b"".join(self.token_bytes(int(id), skip_special) for id in ids)
        text = raw.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text


class StreamDecoder:
    """`decode`, a few tokens at a time: the concatenation of all pushes and the flush equals
    decode(all ids). A character whose bytes are not all there yet is held back."""

    def __init__(self, vocabulary: Vocabulary, skip_special: bool = True):
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = vocabulary.strips_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` completes."""
        raw = b"".join(self._vocabulary.token_bytes(int(id), self._skip_special) for id in ids)
        return self._emit(self._utf8.decode(raw))

    def flush(self) -> str:
        """What is held back: U+FFFD for a character that never became whole, else nothing. The
        decoder then begins a new text."""
        text = self._emit(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._at_start = self._vocabulary.strips_space
        return text

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """End a text at the first stop string, which is not part of it.

    "First" is the one that is complete first (the longest of those that end at the same place):
    the result does not depend on how the text was cut into pushes. ConfigError on an empty string.
    """

    def __init__(self, stops: Sequence[str]):
        if isinstance(stops, str) or not all(stops):
            raise ConfigError("a stop string is empty: leave it out, or pass a list of texts")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=1)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to emit, whether a stop string was met). What could be the beginning
        of a stop string is held back; after a stop everything is dropped."""
        if self.stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self.stopped = "", True
            return text[: min(found)[1]], True
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What is held back, now that no more text comes."""
        text, self._held = self._held, ""
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
