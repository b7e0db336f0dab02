"""How far a long command is: the status line of a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import logging
import sys
import time

_log = logging.getLogger(__name__)


class Progress:
    """progress = Progress("training", 1000, "steps"), begun when it is made. before: done in an earlier run.

    due: whether it is time to say something (asking first saves a wait for the device). show: say it, with
    the speed and the time left.
    """

    def __init__(self, what: str, total: int, unit: str, before: int = 0):
        self._what, self._total, self._unit, self._before = what, total, unit, before
        self._live = sys.stderr.isatty()
        self._began = self._said = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._said >= (0.5 if self._live else 10.0)

    def show(self, done: int, more: str = "") -> None:
        self._said = time.monotonic()
        speed = (done - self._before) / max(self._said - self._began, 1e-9)
        left = max(0, self._total - done) / max(speed, 1e-9)
        parts = [f"{self._what}: {done:,} of {self._total:,} {self._unit}", f"{speed:.1f}/s", more]
        text = ", ".join(part for part in [*parts, f"{_clock(left)} left"] if part)
        if self._live:
            _log.info("%s", text)  # the status line is the screen's (dflash_jax/terminal.py)
        else:
            print(text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
