"""Text of one row while its tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash_jax.streaming import StopStrings, StreamDecoder, Vocabulary


def counted(number: int, thing: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


class RowText:
    """Whole characters only, and nothing of a stop string.

    text: what may be shown so far. kept: tokens up to the one that completed a stop string, all so far
    when none did.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()):
        self._decoder = StreamDecoder(vocabulary)
        self._stops = StopStrings(stops)
        self.text, self.kept = "", 0

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens add. Tokens after a stop string add nothing and are not kept."""
        new = ""
        for id in ids:
            if self.stopped:
                break
            self.kept += 1
            new += self._stops.push(self._decoder.push([id]))[0]
        self.text += new
        return new

    def flush(self) -> str:
        """What was held back, now that the row is over."""
        if self.stopped:
            return ""
        new, stopped = self._stops.push(self._decoder.flush())
        new += "" if stopped else self._stops.flush()
        self.text += new
        return new
