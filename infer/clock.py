"""Where the time of a request went: loading, compiling, prefill, decoding.

Compiling is not guessed from a first and a second run. JAX reports the begin and the end of everything
that it traces, lowers and compiles (or reads from the cache of compiled programs); the union of these
intervals is `compile`, and each stage is its wall time without it. A stage ends when its arrays are
ready, so nothing that runs in the background is missed. With the embedding table on the host there is one more,
`embedding`: what of prefill and decoding went into looking rows up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.monitoring

STAGES = ("load", "compile", "prefill", "decode")
_COMPILING = "/jax/core/compile/"


class Clock:
    """Seconds per stage; a stage that is entered twice adds up."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        spans: list[tuple[float, float]] = []

        def listen(event: str, start_time: float, end_time: float, **_: str | int) -> None:
            if event.startswith(_COMPILING):
                spans.append((start_time, end_time))

        jax.monitoring.register_event_time_span_listener(listen)
        begin = time.time()  # the clock of JAX's events
        try:
            yield
        finally:
            end = time.time()
            jax.monitoring.unregister_event_time_span_listener(listen)
            compiling = covered(spans, begin, end)
            self.seconds["compile"] += compiling
            self.seconds[name] += end - begin - compiling


def covered(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """Length of the union of intervals inside [begin, end]: tracing nests, so sums count twice."""
    total, reached = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, reached), min(stop, end)
        total += max(0.0, stop - start)
        reached = max(reached, stop)
    return total
