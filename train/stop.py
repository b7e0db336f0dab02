"""Being asked to stop: by SIGTERM (a scheduler, a closing machine) or the first Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """A context manager in which a signal is a request, that `requested` tells between two steps. A second
    Ctrl-C interrupts as ever.

    Of several processes JAX's own service hears SIGTERM, and lets all of them stop at the same step.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> Stop:
        self._shared = jax.process_count() > 1
        here = threading.current_thread() is threading.main_thread() and not self._shared
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS} if here else {}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """step: one more each time, the same in all processes."""
        if self._shared and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal is not None

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
