"""What is said beside the output, all on stderr: a status line while something long runs (on a terminal
only), notes (the library's warnings), and everything with --debug."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

PACKAGES = ("dflash_jax", "train", "infer")


class Screen(logging.Handler):
    """Shows log messages and warnings of our packages while a command runs (a context manager).

    Information updates the status line; a warning is a line of its own, said once. `clear` before
    output that goes to the same terminal.
    """

    def __init__(self, debug: bool = False):
        super().__init__()
        self._debug = debug
        self._status: Any = None
        self._said: set[str] = set()

    def __enter__(self) -> Screen:
        if sys.stderr.isatty() and not self._debug:
            from rich.console import Console  # 0.1 s, and only a terminal needs it

            self._status = Console(stderr=True).status("starting ...")
            self._status.start()
        self._loggers = [logging.getLogger(name) for name in PACKAGES]
        self._before = [(logger.level, logger.propagate) for logger in self._loggers]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.setLevel(logging.DEBUG if self._debug else logging.INFO)
            logger.propagate = False
        self._show, warnings.showwarning = warnings.showwarning, self._warning
        return self

    def __exit__(self, *_: Any) -> None:
        self.clear()
        warnings.showwarning = self._show
        for logger, (level, propagate) in zip(self._loggers, self._before, strict=True):
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate

    def clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            self.note(text)
        elif self._debug:
            print(text, file=sys.stderr, flush=True)
        elif self._status is not None:
            self._status.update(f"{text} ...")

    def note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            print(f"note: {text}", file=sys.stderr, flush=True)

    def _warning(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self.note(str(message))
