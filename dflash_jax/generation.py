"""A generation that has left the device: tokens, and how each round went."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from dflash_jax.state import LENGTH, RUNNING, STOP, RoundState


class DraftWarning(UserWarning):
    """The draft never helps: the signature of wrong taps or positions."""


@dataclass(frozen=True)
class Generation:
    """A finished generation on the host. One entry per batch row.

    tokens: the output. finish_reasons: "stop" or "length". committed: tokens kept in each of the
    row's rounds (the paper's acceptance length; the first token is the prefill's and in none).
    sizes: the most that a row of each round of the batch could have committed (the longest path that was
    verified, anchor included). logprobs: log p of each token, None if not kept.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    committed: list[list[int]]
    sizes: list[int]
    logprobs: list[list[float]] | None = None

    @property
    def tau(self) -> float:
        """Mean committed per round over all rows; nan without rounds."""
        flat = [n for row in self.committed for n in row]
        return float(np.mean(flat)) if flat else float("nan")

    def acceptance_by_position(self) -> list[float]:
        """Share of rounds that kept candidate 1, 2, ... among the rounds that offered one."""
        rounds = [pair for row in self.committed for pair in zip(row, self.sizes, strict=False)]
        shares = []
        for position in range(1, max(self.sizes, default=1)):
            offered = [kept for kept, size in rounds if size > position]
            shares.append(float(np.mean([kept > position for kept in offered])) if offered else 0.0)
        return shares

    def histogram(self) -> list[int]:
        """How many rounds accepted 0, 1, ..., C-1 candidates."""
        accepted = [n - 1 for row in self.committed for n in row]
        return np.bincount(accepted, minlength=max(self.sizes, default=1)).tolist()


def finish(state: RoundState, logprobs: bool = False) -> Generation:
    """Copy a state's output to the host. Warns when no candidate was ever accepted over a long run."""
    tokens, emitted, reason = (np.asarray(x) for x in (state.tokens, state.emitted, state.reason))
    rounds, committed = int(state.rounds), np.asarray(state.committed)
    names = {STOP: "stop", LENGTH: "length", RUNNING: "running"}
    generation = Generation(
        tokens=[row[:n].tolist() for row, n in zip(tokens, emitted, strict=True)],
        finish_reasons=[names[int(r)] for r in reason],
        committed=[[int(n) for n in row[:rounds] if n > 0] for row in committed],
        sizes=np.asarray(state.sizes)[:rounds].tolist(),
        logprobs=[row[:n].tolist() for row, n in zip(np.asarray(state.logprobs), emitted, strict=True)]
        if logprobs
        else None,
    )
    ran = sum(len(row) for row in generation.committed)
    if ran >= 64 and max(generation.sizes) > 1 and generation.tau == 1.0:
        warnings.warn(
            f"no candidate was accepted in {ran} rounds: an untrained draft, or taps, positions or "
            "mask id that do not belong to this target",
            DraftWarning,
            stacklevel=2,
        )
    return generation
